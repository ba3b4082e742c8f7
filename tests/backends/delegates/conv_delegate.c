/* A TFLite delegate that takes int8 CONV_2D and computes it itself: exact sums, one multiplication in double, half to even.

   Options: mode=right (default) | faulty (the conv of operator `node` floors instead of rounding, from channel 1 on)
            | abort (dies when it is asked to prepare) | short (dies of models of up to `node` operators) | refuse (Prepare returns an error)
            | extra (faulty only while a partition has several outputs: what looking may provoke); anything else: NULL
   The structures are those of tensorflow/lite/core/c/common.h, unchanged since 2.14; only what is used has a type. */

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int size; int data[]; } IntArray;
typedef struct { int size; float data[]; } FloatArray;
typedef struct { FloatArray *scale; IntArray *zero_point; int32_t dimension; } Affine;
typedef struct Context Context;
typedef struct Delegate Delegate;
typedef struct {
    int type;
    void *data;
    IntArray *dims;
    struct { float scale; int32_t zero_point; } params;
    int allocation;
    size_t bytes;
    const void *map;
    const char *name;
    Delegate *delegate;
    int buffer_handle;
    bool stale, variable;
    struct { int type; void *params; } quantization;
    void *sparsity;
    const IntArray *dims_signature;
} Tensor;
typedef struct {
    IntArray *inputs, *outputs, *intermediates, *temporaries;
    void *user_data, *builtin_data;
    const void *custom_data;
    int custom_size;
    Delegate *delegate;
    bool side_effect;
} Node;
typedef struct {
    void *(*init)(Context *, const char *, size_t);
    void (*free)(Context *, void *);
    int (*prepare)(Context *, Node *);
    int (*invoke)(Context *, Node *);
    const char *(*profiling_string)(const Context *, const Node *);
    int32_t builtin_code;
    const char *custom_name;
    int version;
    void *reserved[6]; /* fields that later versions added behind */
} Registration;
struct Context {
    size_t tensors_size;
    int (*GetExecutionPlan)(Context *, IntArray **);
    Tensor *tensors;
    void *impl;
    int (*ResizeTensor)(Context *, Tensor *, IntArray *);
    void (*ReportError)(Context *, const char *, ...);
    int (*AddTensors)(Context *, int, int *);
    int (*GetNodeAndRegistration)(Context *, int, Node **, Registration **);
    int (*ReplaceNodes)(Context *, Registration, const IntArray *, Delegate *);
};
struct Delegate {
    void *data;
    int (*Prepare)(Context *, Delegate *);
    void *copy_from, *copy_to, *free_handle;
    int64_t flags;
    void *opaque;
};
typedef struct { Delegate *delegate; IntArray *nodes, *inputs, *outputs; } Params;
typedef struct { int padding, stride_w, stride_h, activation, dilation_w, dilation_h; } Conv;
typedef struct { int mode, node; } Options;
enum { RIGHT, FAULTY, ABORT, REFUSE, EXTRA, SHORT };
enum { CONV_2D = 3, INT8 = 9, SAME = 1, RELU = 1, RELU6 = 3 };

typedef struct {
    Options options;
    int count, *indices, outputs;
    Node **nodes;
    void **scratch; /* of each node: memory for a result that no one outside reads */
} Kernel;

static void *init(Context *context, const char *buffer, size_t length) {
    (void)length;
    const Params *params = (const Params *)buffer;
    Kernel *kernel = calloc(1, sizeof *kernel);
    kernel->options = *(Options *)params->delegate->data;
    kernel->count = params->nodes->size;
    kernel->outputs = params->outputs->size;
    kernel->indices = calloc(kernel->count, sizeof(int));
    kernel->nodes = calloc(kernel->count, sizeof(Node *));
    kernel->scratch = calloc(kernel->count, sizeof(void *));
    for (int k = 0; k < kernel->count; k++) {
        Registration *registration;
        kernel->indices[k] = params->nodes->data[k];
        context->GetNodeAndRegistration(context, kernel->indices[k], &kernel->nodes[k], &registration);
        const int out = kernel->nodes[k]->outputs->data[0];
        bool outside = false;
        for (int j = 0; j < params->outputs->size; j++) outside |= params->outputs->data[j] == out;
        if (!outside) {
            size_t size = 1;
            const IntArray *dims = context->tensors[out].dims;
            for (int j = 0; j < dims->size; j++) size *= dims->data[j];
            kernel->scratch[k] = malloc(size);
        }
    }
    return kernel;
}

static void release(Context *context, void *data) {
    (void)context;
    Kernel *kernel = data;
    for (int k = 0; k < kernel->count; k++) free(kernel->scratch[k]);
    free(kernel->scratch);
    free(kernel->nodes);
    free(kernel->indices);
    free(kernel);
}

static const int8_t *input_of(const Kernel *kernel, const Context *context, int tensor) {
    for (int k = 0; k < kernel->count; k++)
        if (kernel->scratch[k] && kernel->nodes[k]->outputs->data[0] == tensor) return kernel->scratch[k];
    return context->tensors[tensor].data;
}

static int before(int in, int out, int kernel, int stride, int dilation) {
    const int total = (out - 1) * stride + (kernel - 1) * dilation + 1 - in;
    return total > 0 ? total / 2 : 0;
}

static void convolve(const Kernel *kernel, Context *context, int k) {
    const Node *node = kernel->nodes[k];
    const Conv *conv = node->builtin_data;
    const Tensor *x = &context->tensors[node->inputs->data[0]], *w = &context->tensors[node->inputs->data[1]];
    const Tensor *out = &context->tensors[node->outputs->data[0]];
    const int32_t *bias = node->inputs->size > 2 && node->inputs->data[2] >= 0 ? context->tensors[node->inputs->data[2]].data : NULL;
    const int8_t *a = input_of(kernel, context, node->inputs->data[0]), *b = w->data;
    int8_t *result = kernel->scratch[k] ? kernel->scratch[k] : out->data;
    const int *xd = x->dims->data, *wd = w->dims->data, *od = out->dims->data;
    const FloatArray *scales = ((const Affine *)w->quantization.params)->scale;
    const int top = conv->padding == SAME ? before(xd[1], od[1], wd[1], conv->stride_h, conv->dilation_h) : 0;
    const int left = conv->padding == SAME ? before(xd[2], od[2], wd[2], conv->stride_w, conv->dilation_w) : 0;
    const int mode = kernel->options.mode;
    const bool faulty = kernel->indices[k] == kernel->options.node && (mode == FAULTY || (mode == EXTRA && kernel->outputs > 1));
    int low = -128, high = 127;
    if (conv->activation == RELU || conv->activation == RELU6) low = out->params.zero_point > low ? out->params.zero_point : low;
    if (conv->activation == RELU6) {
        const int six = (int)rint(6.0 / out->params.scale) + out->params.zero_point;
        high = six < high ? six : high;
    }
    for (int n = 0; n < od[0]; n++) for (int y = 0; y < od[1]; y++) for (int z = 0; z < od[2]; z++) for (int c = 0; c < od[3]; c++) {
        int32_t sum = bias ? bias[c] : 0;
        for (int i = 0; i < wd[1]; i++) for (int j = 0; j < wd[2]; j++) {
            const int row = y * conv->stride_h - top + i * conv->dilation_h, column = z * conv->stride_w - left + j * conv->dilation_w;
            if (row < 0 || row >= xd[1] || column < 0 || column >= xd[2]) continue;
            const int8_t *from = a + (((size_t)n * xd[1] + row) * xd[2] + column) * xd[3];
            const int8_t *by = b + (((size_t)c * wd[1] + i) * wd[2] + j) * wd[3];
            for (int d = 0; d < wd[3]; d++) sum += (from[d] - x->params.zero_point) * by[d];
        }
        const double scale = (double)x->params.scale * scales->data[scales->size > 1 ? c : 0] / out->params.scale;
        const double real = sum * scale;
        int code = (int)(faulty && c > 0 ? floor(real) : rint(real)) + out->params.zero_point;
        code = code < low ? low : code > high ? high : code;
        result[(((size_t)n * od[1] + y) * od[2] + z) * od[3] + c] = (int8_t)code;
    }
}

static int invoke(Context *context, Node *node) {
    const Kernel *kernel = node->user_data;
    for (int k = 0; k < kernel->count; k++) convolve(kernel, context, k);
    return 0;
}

static int prepare(Context *context, Delegate *delegate) {
    const Options *options = delegate->data;
    if (options->mode == ABORT) abort();
    if (options->mode == REFUSE) {
        context->ReportError(context, "the conv delegate does not like this model");
        return 1;
    }
    IntArray *plan;
    if (context->GetExecutionPlan(context, &plan)) return 1;
    if (options->mode == SHORT && plan->size <= options->node) abort();
    IntArray *taken = calloc(1, sizeof(IntArray) + plan->size * sizeof(int));
    for (int k = 0; k < plan->size; k++) {
        Node *node;
        Registration *registration;
        if (context->GetNodeAndRegistration(context, plan->data[k], &node, &registration)) return 1;
        if (registration->builtin_code == CONV_2D && context->tensors[node->inputs->data[0]].type == INT8)
            taken->data[taken->size++] = plan->data[k];
    }
    const Registration own = {init, release, NULL, invoke, NULL, 0, "ConvDelegate", 1, {0}};
    const int status = context->ReplaceNodes(context, own, taken, delegate);
    free(taken);
    return status;
}

Delegate *tflite_plugin_create_delegate(char **keys, char **values, size_t count, void (*report_error)(const char *)) {
    static const char *const modes[] = {"right", "faulty", "abort", "refuse", "extra", "short"};
    Options *options = calloc(1, sizeof *options);
    for (size_t k = 0; k < count; k++) {
        if (!strcmp(keys[k], "node")) options->node = atoi(values[k]);
        if (strcmp(keys[k], "mode")) continue;
        options->mode = -1;
        for (int m = 0; m < 6; m++) if (!strcmp(values[k], modes[m])) options->mode = m;
    }
    if (options->mode < 0) {
        report_error("the conv delegate has no such mode");
        free(options);
        return NULL;
    }
    Delegate *delegate = calloc(1, sizeof *delegate + 64);
    delegate->data = options;
    delegate->Prepare = prepare;
    return delegate;
}

void tflite_plugin_destroy_delegate(Delegate *delegate) {
    if (!delegate) return;
    free(delegate->data);
    free(delegate);
}
