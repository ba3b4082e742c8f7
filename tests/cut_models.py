"""Small models of every kind that is hard to cut, and an oracle for cuts that shares no code with the cutter.

`KINDS` names a maker for each kind; `FEEDS` holds feeds where random ones would not do. `assert_whole` runs head and tail by
ONNX Runtime alone and compares with the model, bit for bit; `assert_minimal` says that nothing came along that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, parser

from equivcheck.parts import SplitPart

Maker = Callable[[], onnx.ModelProto]
Feeds = Mapping[str, np.ndarray]
KINDS: dict[str, Maker] = {}
FEEDS: dict[str, Feeds] = {}
IR, OPSET = 8, 17


def kind(make: Maker) -> Maker:
    KINDS[make.__name__] = make
    return make


def text(body: str, *functions: str, ir: int = IR, opset: int = OPSET, domains: str = "") -> onnx.ModelProto:
    """A model in ONNX's own text form; `domains` such as `, "local": 1`. Everything that parts must keep is set."""
    opsets = f'["": {opset}{domains}]'
    kept = 'producer_name: "maker", producer_version: "7", model_version: 3, doc_string: "what it is for"'
    header = f'<ir_version: {ir}, opset_import: {opsets}, {kept}, metadata_props: ["author": "a person"]>'
    made = parser.parse_model("\n".join([header, body, *functions]))
    made.domain = "org.example"
    made.graph.doc_string = "about the graph"
    for node in made.graph.node:
        node.doc_string = f"makes {', '.join(node.output)}"
    return made


# -- branches and several outputs ---------------------------------------------------------------------------------------


@kind
def skips_that_cross_every_cut() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x) => (float[2,3] y) {
            [first] a = Relu(x)
            [second] b = Sigmoid(a)
            [third] c = Add(b, a)
            [fourth] d = Mul(c, x)
            [fifth] y = Sub(d, a)
        }""")


@kind
def several_outputs_some_of_them_read_again() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x, float[2,3] other) => (float[2,3] early, float[2,3] y, float[2,3] apart) {
            early = Relu(x)
            b = Sigmoid(early)
            y = Add(b, early)
            apart = Neg(other)
        }""")


@kind
def nodes_with_several_outputs_of_which_one_dangles() -> onnx.ModelProto:
    return text("""
        g (float[2,6] x) => (float[2,2] y, int64[2,2] places) <int64[1] k = {2}, int64[3] sizes = {2, 2, 2}> {
            [split] s0, s1, s2 = Split <axis = 1> (x, sizes)
            sum = Add(s0, s2)
            [best] values, places = TopK(sum, k)
            y = Mul(values, s2)
        }""")


@kind
def empty_names_for_inputs_and_outputs_that_are_left_out() -> onnx.ModelProto:
    return text("""
        g (float[2,1,3] x) => (float[1,1,2] y, float[2,1,6] big) <float high = {0.5}, float[3] scales = {1.0, 1.0, 2.0},
            float[1,6,3] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}, float[1,6,2] r = {1,2,3,4,5,6,7,8,9,1,2,3},
            float[1,1,2] start = {1, 2}> {
            [clip] a = Clip(x, , high)
            [resize] big = Resize <mode = "nearest"> (a, , scales)
            [cells] , last = GRU <hidden_size = 2> (a, w, r, , , start)
            [drop] dropped, = Dropout(last)
            [end] y = Neg(dropped)
        }""")


@kind
def unnamed_nodes() -> onnx.ModelProto:
    made = skips_that_cross_every_cut()
    for node in made.graph.node:
        node.name = ""
    return made


@kind
def nodes_that_all_share_one_name() -> onnx.ModelProto:
    made = skips_that_cross_every_cut()
    for node in made.graph.node:
        node.name = "layer"
    return made


@kind
def dead_nodes() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x, float[2,3] nobody) => (float[2,3] y) <float[3] unused = {1, 2, 3}> {
            a = Relu(x)
            [dead_node] dead = Sigmoid(a)
            [dead_too] deader = Add(dead, nobody)
            y = Neg(a)
        }""")


@kind
def diamonds() -> onnx.ModelProto:
    lines = ["v0 = Relu(x)"]
    for k in range(4):
        lines += [f"l{k} = Sigmoid(v{k})", f"r{k} = Neg(v{k})", f"v{k + 1} = Add(l{k}, r{k})"]
    return text("g (float[2,3] x) => (float[2,3] v4) {" + "\n".join(lines) + "}")


# -- bodies -------------------------------------------------------------------------------------------------------------

_CHOICE = """
    [branch] z = If (flag) <
        then_branch = one () => (float[2,3] t) { s = Mul(h, weight) t = Add(s, late) },
        else_branch = two () => (float[2,3] e) { e = Neg(late) }
    >"""


@kind
def an_if_whose_bodies_read_outer_values() -> onnx.ModelProto:
    return text(
        """
        g (float[2,3] x, bool flag) => (float[2,3] y) <float[3] weight = {1, 2, 3}, float[3] unread = {4, 5, 6}> {
            [scale] h = Relu(x)
            [later] late = Sigmoid(h)"""
        + _CHOICE
        + """
            [end] y = Add(z, x)
        }"""
    )


@kind
def an_if_that_computes_its_condition() -> onnx.ModelProto:
    return text(
        """
        g (float[2,3] x) => (float[2,3] y) <float[3] weight = {1, 2, 3}, float zero = {0}> {
            [scale] h = Relu(x)
            [sum] total = ReduceSum <keepdims = 0> (h)
            [gt] flag = Greater(total, zero)
            [later] late = Sigmoid(x)"""
        + _CHOICE
        + """
            [end] y = Neg(z)
        }"""
    )


@kind
def an_if_with_a_constant_condition() -> onnx.ModelProto:
    return text(
        """
        g (float[2,3] x) => (float[2,3] y) <float[3] weight = {1, 2, 3}> {
            flag = Constant <value = bool {1}> ()
            [scale] h = Relu(x)
            [later] late = Sigmoid(h)"""
        + _CHOICE
        + """
            [end] y = Neg(z)
        }"""
    )


@kind
def an_if_in_a_loop_in_an_if() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x, bool flag) => (float[2,3] y)
        <float[3] weight = {1, 2, 3}, int64 trips = {3}, bool true = {1}, float zero = {0}> {
            [scale] h = Mul(x, weight)
            [deep] deep = Sigmoid(x)
            [branch] z = If (flag) <
                then_branch = one () => (float[2,3] t) {
                    t = Loop (trips, true, h) <body = again (int64 i, bool go, float[2,3] v) => (bool on, float[2,3] w) {
                        on = Identity(go)
                        total = ReduceSum <keepdims = 0> (v)
                        more = Greater(total, zero)
                        w = If (more) <
                            then_branch = three () => (float[2,3] a) { a = Sub(v, deep) },
                            else_branch = four () => (float[2,3] b) { b = Add(v, weight) }
                        >
                    }>
                },
                else_branch = two () => (float[2,3] e) { e = Identity(deep) }
            >
            [end] y = Neg(z)
        }""")


@kind
def a_scan_that_reads_an_outer_value() -> onnx.ModelProto:
    return text("""
        g (float[4,3] x, float[3] start) => (float[3] final, float[4,3] y) {
            [outer] outer = Relu(start)
            [rows] rows = Sigmoid(x)
            [scan] final, sums = Scan <num_scan_inputs = 1,
                body = add (float[3] state, float[3] row) => (float[3] next, float[3] out) {
                    next = Add(state, row)
                    out = Mul(next, outer)
                }> (start, rows)
            [end] y = Neg(sums)
        }""")


@kind
def a_body_that_hands_an_outer_value_on() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x, bool flag) => (float[2,3] y) {
            h = Relu(x)
            other = Neg(x)
            z = If (flag) <
                then_branch = one () => (float[2,3] t) { t = Identity(h) },
                else_branch = two () => (float[2,3] e) { e = Identity(other) }
            >
            y = Add(z, other)
        }""")


@kind
def a_body_with_initializers_and_inputs_of_outer_names() -> onnx.ModelProto:
    """Names that mean something else inside a body; the outer ones are read by the main graph only."""
    made = text("""
        g (float[2,3] x, int64 trips, bool go) => (float[2,3] y) {
            h = Relu(x)
            z = Loop (trips, go, h) <body = again (int64 i, bool on, float[2,3] state) => (bool more, float[2,3] next) {
                more = Identity(on)
                next = Add(state, own)
            }>
            k = Sigmoid(h)
            y = Mul(z, k)
        }""")
    body = made.graph.node[1].attribute[0].g
    body.initializer.append(numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "own"))
    return made


FEEDS["a_body_with_initializers_and_inputs_of_outer_names"] = {
    "x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "trips": np.array(3),
    "go": np.array(True),
}


@kind
def a_loop_with_scan_outputs() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x) => (float[2,3] y, float[N,2,3] all) <int64 trips = {3}, bool go = {1}> {
            h = Relu(x)
            step = Sigmoid(x)
            last, all = Loop (trips, go, h) <
                body = again (int64 i, bool on, float[2,3] v) => (bool more, float[2,3] w, float[2,3] seen) {
                    more = Identity(on)
                    w = Add(v, step)
                    seen = Neg(w)
                }>
            y = Sub(last, step)
        }""")


# -- local functions ----------------------------------------------------------------------------------------------------

_TWICE = """<domain: "local", opset_import: ["": 17]>
    Twice (u) => (v) { w = Relu(u) v = Add(w, u) }"""
_QUAD = """<domain: "local", opset_import: ["": 17, "local": 1]>
    Quad (u) => (v) { w = local.Twice(u) v = local.Twice(w) }"""
_SCALED = """<domain: "local", opset_import: ["": 17]>
    Scaled <by> (u, extra) => (v, w) { k = Constant <value_float: float = @by> () v = Mul(u, k) w = Add(u, extra) }"""
_UNUSED = """<domain: "local", opset_import: ["": 17]>
    Unused (u) => (v) { v = Neg(u) }"""
_LOCAL = ', "local": 1'


@kind
def nested_local_functions_without_value_info() -> onnx.ModelProto:
    return text(
        """
        g (float[2,3] x) => (float[2,3] y) {
            [scale] h = Sigmoid(x)
            [call] q = local.Quad(h)
            [with_attribute] s, t = local.Scaled <by = 2.5> (q, h)
            [end] y = Sub(s, t)
        }""",
        _TWICE,
        _QUAD,
        _SCALED,
        _UNUSED,
        domains=_LOCAL,
    )


@kind
def a_local_function_that_only_a_body_calls() -> onnx.ModelProto:
    return text(
        """
        g (float[2,3] x, bool flag) => (float[2,3] y) {
            h = Sigmoid(x)
            z = If (flag) <
                then_branch = one () => (float[2,3] t) { t = local.Quad(h) },
                else_branch = two () => (float[2,3] e) { e = Neg(h) }
            >
            y = Add(z, h)
        }""",
        _TWICE,
        _QUAD,
        _UNUSED,
        domains=_LOCAL,
    )


@kind
def a_local_function_with_a_body_inside() -> onnx.ModelProto:
    return text(
        """
        g (float[2,3] x, bool flag) => (float[2,3] y) {
            h = Sigmoid(x)
            [call] z = local.Choose(h, flag)
            y = Add(z, h)
        }""",
        """<domain: "local", opset_import: ["": 17, "local": 1]>
        Choose (u, c) => (v) {
            v = If (c) <
                then_branch = one () => (float[2,3] t) { t = local.Twice(u) },
                else_branch = two () => (float[2,3] e) { e = Neg(u) }
            >
        }""",
        _TWICE,
        domains=_LOCAL,
    )


@kind
def two_overloads_of_one_local_function() -> onnx.ModelProto:
    made = text(
        """
        g (float[2,3] x) => (float[2,3] y) {
            a = local.Twice(x)
            b = local.Twice(a)
            y = Neg(b)
        }""",
        _TWICE,
        """<domain: "local", opset_import: ["": 17]>
        Twice (u) => (v) { w = Sigmoid(u) v = Mul(w, u) }""",
        domains=_LOCAL,
        ir=10,
    )
    made.functions[1].overload = made.graph.node[1].overload = "other"
    return made


# -- operators without types --------------------------------------------------------------------------------------------


@kind
def contrib_operators_without_shape_inference() -> onnx.ModelProto:
    made = text(
        """
        g (float[2,4] x) => (float[2,4] y)
        <float scale = {0.02}, uint8 zero = {128}, float[4,4] weight =
            {1, 0, 0, 2, 0, 1, 3, 0, 1, 0, 1, 0, 0, 1, 0, 1}> {
            [fused] a = com.microsoft.FusedMatMul <alpha = 0.5> (x, weight)
            [quantise] q = QuantizeLinear(a, scale, zero)
            [add] r = com.microsoft.QLinearAdd(q, scale, zero, q, scale, zero, scale, zero)
            [gelu] g = com.microsoft.Gelu(a)
            [dequantise] s = DequantizeLinear(r, scale, zero)
            [end] y = Add(s, g)
        }""",
        domains=', "com.microsoft": 1',
    )
    del made.graph.value_info[:]
    return made


@kind
def a_sequence_crosses_the_cut() -> onnx.ModelProto:
    return text("""
        g (float[2,6] x) => (float[2,6] y) <int64[3] sizes = {1, 2, 3}, int64 one = {1}> {
            h = Relu(x)
            parts = SplitToSequence <axis = 1> (h, sizes)
            second = SequenceAt(parts, one)
            joined = ConcatFromSequence <axis = 1> (parts)
            scaled = ReduceMax <keepdims = 0> (second)
            y = Mul(joined, scaled)
        }""")


@kind
def text_crosses_the_cut() -> onnx.ModelProto:
    made = text("""
        g (float[3] x) => (float[3] y) {
            h = Relu(x)
            words = Cast <to = 8> (h)
            back = Cast <to = 1> (words)
            y = Add(back, x)
        }""")
    return made


@kind
def scalars_and_empty_tensors() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x) => (float y, float[0,3] nothing) <int64[1] none = {0}, int64[1] start = {0}> {
            total = ReduceSum <keepdims = 0> (x)
            half = Sqrt(total)
            y = Neg(half)
            head = Slice(x, start, none)
            nothing = Relu(head)
        }""")


FEEDS["scalars_and_empty_tensors"] = {"x": np.ones((2, 3), np.float32)}


# -- constants ----------------------------------------------------------------------------------------------------------


@kind
def weights_in_sparse_initializers() -> onnx.ModelProto:
    made = text("""
        g (float[2,3] x) => (float[2,3] y) {
            a = MatMul(x, sparse)
            b = Relu(a)
            c = MatMul(b, sparser)
            y = Add(c, x)
        }""")
    for name, places in (("sparse", [0, 4, 7]), ("sparser", [2, 3])):
        values = numpy_helper.from_array(np.arange(1, len(places) + 1, dtype=np.float32), name)
        indices = numpy_helper.from_array(np.array(places, np.int64), f"{name}_indices")
        made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 3]))
    return made


@kind
def ir_3_where_weights_are_inputs() -> onnx.ModelProto:
    return text(
        """
        g (float[2,3] x, float[3] w, float[3] v) => (float[2,3] y)
        <float[3] w = {1, 2, 3}, float[3] v = {3, 2, 1}> {
            a = Mul(x, w)
            b = Relu(a)
            y = Add(b, v)
        }""",
        ir=3,
        opset=8,
    )


@kind
def weights_that_may_be_overridden() -> onnx.ModelProto:
    """From IR 4 on, an initializer that is an input too has a default and need not be fed."""
    return text(
        """
        g (float[2,3] x, float[3] w) => (float[2,3] y) <float[3] w = {1, 2, 3}> {
            a = Mul(x, w)
            b = com.microsoft.Gelu(a)
            y = Add(b, w)
        }""",
        domains=', "com.microsoft": 1',
    )


@kind
def weights_that_nodes_compute_from_initializers() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x) => (float[2,3] y) <float[3] w = {1, 2, 3}> {
            two = Constant <value_float = 2.0> ()
            [double] doubled = Mul(w, two)
            [first] a = Add(x, doubled)
            [square] squared = Mul(doubled, doubled)
            [second] y = Mul(a, squared)
        }""")


@kind
def outputs_that_no_node_computes() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x, float[2] through) => (float[2,3] y, float[3] w, float[2] through, float[3] doubled)
        <float[3] w = {1, 2, 3}> {
            doubled = Add(w, w)
            a = Mul(x, doubled)
            y = Relu(a)
        }""")


@kind
def outputs_that_no_node_computes_beside_one_that_is() -> onnx.ModelProto:
    """Cut at its last node, nothing is left to compute: these outputs must come out of the head."""
    return text("""
        g (float[2,3] x, float[2] through) => (float[3] w, float[2,3] y, float[2] through) <float[3] w = {1, 2, 3}> {
            a = Mul(x, w)
            y = Relu(a)
        }""")


@kind
def a_node_called_like_the_first_of_its_outputs() -> onnx.ModelProto:
    return text("""
        g (float[2,6] x) => (float[2,3] y) {
            [parts] parts, rest = Split <axis = 1> (x)
            [y] y = Add(parts, rest)
        }""")


@kind
def constants_alone_make_every_output() -> onnx.ModelProto:
    return text("""
        g (float[2,3] x) => (float[3] y) <float[3] w = {1, 2, 3}> {
            a = Add(w, w)
            y = Relu(a)
        }""")


@kind
def random_numbers_with_a_seed() -> onnx.ModelProto:
    """A node without inputs that is not a constant: if both parts ran it, its numbers would only agree by the seed."""
    return text("""
        g (float[2,3] x) => (float[2,3] y) {
            [noise] noise = RandomNormal <shape = [2, 3], seed = 3.0> ()
            a = Add(x, noise)
            b = Relu(a)
            y = Mul(b, noise)
        }""")


def random_numbers_that_change() -> onnx.ModelProto:
    """ONNX Runtime seeds them by the node's place, which is another one in the tail."""
    return text("""
        g (float[2,3] x) => (float[2,3] y) {
            [first] a = Relu(x)
            [noise] noise = RandomNormal <shape = [2, 3]> ()
            [end] y = Add(a, noise)
        }""")


# -- shapes, opsets, types ----------------------------------------------------------------------------------------------


@kind
def symbolic_dimensions() -> onnx.ModelProto:
    return text("""
        g (float[N,3,H,W] x) => (float[N,3] y) <int64[2] last = {0, -1}> {
            [relu] a = Relu(x)
            [shape] s = Shape(a)
            [pool] g = GlobalAveragePool(a)
            [flat] f = Reshape(g, last)
            [size] n = ReduceProd <keepdims = 0> (s)
            [real] r = Cast <to = 1> (n)
            [end] y = Mul(f, r)
        }""")


FEEDS["symbolic_dimensions"] = {"x": np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4) / 7}


def chain_of_opset(opset: int, ir: int) -> onnx.ModelProto:
    """Operators whose meaning did not change from opset 7 on; below IR 4 a weight has to be an input too."""
    weight = ", float[3] w" if ir < 4 else ""
    return text(
        f"""
        g (float[2,3] x{weight}) => (float[2,3] y) <float[3] w = {{1, 2, 3}}> {{
            a = Mul(x, w)
            b = Relu(a)
            c = Sigmoid(b)
            y = Add(c, a)
        }}""",
        ir=ir,
        opset=opset,
    )


def _narrow(dtype: int, opset: int, ir: int) -> onnx.ModelProto:
    """A narrow type that crosses, is read twice, and by a body that could not take another type."""
    name = TensorProto.DataType.Name(dtype).lower()
    if name.endswith("int4"):  # ONNX Runtime has no If of int4
        return text(
            f"""
            g (float[5] x, bool flag) => (float[5] y) <float scale = {{0.5}}> {{
                [scaled] h = Neg(x)
                [to_narrow] n = Cast <to = {dtype}> (h)
                [from_narrow] r = Cast <to = 1> (n)
                [branch] z = If (flag) <
                    then_branch = one () => (float[5] t) {{ t = DequantizeLinear(n, scale) }},
                    else_branch = two () => (float[5] e) {{ e = Neg(r) }}
                >
                [end] y = Add(z, r)
            }}""",
            opset=opset,
            ir=ir,
        )
    return text(
        f"""
        g (float[5] x, bool flag) => (float[5] y) {{
            [scaled] h = Neg(x)
            [to_narrow] n = Cast <to = {dtype}> (h)
            [from_narrow] r = Cast <to = 1> (n)
            [branch] z = If (flag) <
                then_branch = one () => ({name}[5] t) {{ t = Identity(n) }},
                else_branch = two () => ({name}[5] e) {{ e = Cast <to = {dtype}> (r) }}
            >
            [real] q = Cast <to = 1> (z)
            [end] y = Add(q, r)
        }}""",
        opset=opset,
        ir=ir,
    )


NARROW = {
    "bfloat16": (TensorProto.BFLOAT16, 17, 8),
    "float8_e4m3fn": (TensorProto.FLOAT8E4M3FN, 19, 9),
    "float8_e4m3fnuz": (TensorProto.FLOAT8E4M3FNUZ, 19, 9),
    "float8_e5m2": (TensorProto.FLOAT8E5M2, 19, 9),
    "float8_e5m2fnuz": (TensorProto.FLOAT8E5M2FNUZ, 19, 9),
    "int4": (TensorProto.INT4, 21, 10),
    "uint4": (TensorProto.UINT4, 21, 10),
}
_VALUES = np.array([7.0, 1.5, -0.0, 2.25, -3.0], np.float32)
for _name, _args in NARROW.items():
    KINDS[f"{_name}_crosses_the_cut"] = lambda args=_args: _narrow(*args)  # type: ignore[misc]  # set on purpose
    FEEDS[f"{_name}_crosses_the_cut"] = {"x": _VALUES, "flag": np.array(True)}


@kind
def bfloat16_weights() -> onnx.ModelProto:
    made = text("""
        g (float[3] x) => (float[3] y) {
            w = Cast <to = 1> (narrow)
            a = Mul(x, w)
            y = Relu(a)
        }""")
    array = np.array([1, 2, 3], ml_dtypes.bfloat16)
    made.graph.initializer.append(
        helper.make_tensor("narrow", TensorProto.BFLOAT16, [3], array.tobytes(), raw=True),
    )
    return made


@kind
def int4_weights_in_blocks() -> onnx.ModelProto:
    made = text(
        """
        g (float[2,8] x) => (float[2,3] y) {
            w = DequantizeLinear <axis = 0, block_size = 4> (codes, scales)
            a = MatMul(x, w)
            y = Relu(a)
        }""",
        opset=21,
        ir=10,
    )
    made.graph.initializer.append(
        helper.make_tensor("codes", TensorProto.INT4, [8, 3], bytes(range(1, 13)), raw=True),
    )
    made.graph.initializer.append(numpy_helper.from_array(np.array([[1, 2, 3], [4, 5, 6]], np.float32), "scales"))
    return made


# -- names --------------------------------------------------------------------------------------------------------------


@kind
def names_with_slashes_of_800_characters() -> onnx.ModelProto:
    made = skips_that_cross_every_cut()
    long = {name: f"/model/{name}/" + "block/" * 130 + name for name in "abcd"}
    for node in made.graph.node:
        node.name = f"/model/{node.name}/" + "layer/" * 130
        node.input[:] = [long.get(name, name) for name in node.input]
        node.output[:] = [long.get(name, name) for name in node.output]
    return made


@kind
def names_like_our_own() -> onnx.ModelProto:
    """Values and nodes that already bear the names a cutter could want to use."""
    return _renamed(
        KINDS["bfloat16_crosses_the_cut"](),
        {"h": "n/bfloat16", "r": "n/exchange", "z": "n/float32"},
        {"scaled": "n/exchange", "end": "n/exchange_2", "from_narrow": "n/not_read"},
    )


FEEDS["names_like_our_own"] = FEEDS["bfloat16_crosses_the_cut"]


def _renamed(made: onnx.ModelProto, values: Mapping[str, str], nodes: Mapping[str, str]) -> onnx.ModelProto:
    pending = [made.graph]
    while pending:
        graph = pending.pop()
        for node in graph.node:
            node.name = nodes.get(node.name, node.name)
            node.input[:] = [values.get(name, name) for name in node.input]
            node.output[:] = [values.get(name, name) for name in node.output]
            pending += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return made


# -- the oracle ---------------------------------------------------------------------------------------------------------


def session(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(proto: onnx.ModelProto, feeds: Feeds) -> dict[str, np.ndarray]:
    """Run without optimisation, on those of `feeds` that the model asks for; all of them must be there."""
    made = session(_uniquely_named(proto))
    names = [port.name for port in made.get_outputs()]
    return dict(zip(names, made.run(names, {port.name: feeds[port.name] for port in made.get_inputs()})))


def _uniquely_named(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for k, node in enumerate(copy.graph.node):
        node.name = f"{k}:{node.name}"
    return copy


def assert_whole(proto: onnx.ModelProto, parts: SplitPart, feeds: Feeds) -> None:
    """Head + tail = model, bit for bit; the tail is fed by the head and by the model's own inputs only."""
    expected = run(proto, feeds)
    got = run(parts.head, feeds)
    if parts.tail is not None:
        fed = {port.name for port in parts.tail.graph.input}
        assert fed & set(parts.boundary) == set(parts.boundary), "every boundary tensor is an input of the tail"
        got |= run(parts.tail, {**feeds, **got})
    for name, array in expected.items():
        assert same(array, got[name]), f"{name}: {array} is {got[name]}"


def same(one: object, other: object) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return repr(one) == repr(other)
    if one.dtype.kind in "OUS":
        return bool(np.array_equal(one, other))
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def assert_valid(made: onnx.ModelProto, *, full: bool = True) -> None:
    onnx.checker.check_model(made, full_check=full)
    assert all(port.type.WhichOneof("value") for port in [*made.graph.input, *made.graph.output]), "ports have types"
    names = [node.name for node in made.graph.node if node.name]
    assert len(names) == len(set(names)), "ONNX Runtime refuses nodes that share a name"


def assert_minimal(made: onnx.ModelProto) -> None:
    """Every node, initializer, input and function of a part is needed for an output of it."""
    wanted = {port.name for port in made.graph.output}
    calls: set[tuple[str, str, str]] = set()
    for node in reversed(made.graph.node):
        assert wanted & set(node.output), f"{node.op_type} -> {list(node.output)} is not needed"
        wanted |= reads(node)
    for tensor in made.graph.initializer:
        assert tensor.name in wanted, f"initializer {tensor.name} is not needed"
    for sparse in made.graph.sparse_initializer:
        assert sparse.values.name in wanted, f"sparse initializer {sparse.values.name} is not needed"
    for port in made.graph.input:
        assert port.name in wanted, f"input {port.name} is not needed"
    pending = list(made.graph.node)
    known = {(f.domain, f.name, f.overload): f for f in made.functions}
    while pending:
        node = pending.pop()
        key = (node.domain, node.op_type, node.overload)
        if key in known and key not in calls:
            calls.add(key)
            pending += known[key].node
        pending += [inner for body in graphs(node) for inner in body.node]
    assert calls == set(known), "functions come along exactly where they are called"


def assert_kept(model: onnx.ModelProto, made: onnx.ModelProto) -> None:
    """What a part must keep of its model, and that its nodes are the model's (but for their names, and exchange casts)."""
    for field in ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
        assert getattr(made, field) == getattr(model, field), field
    assert list(made.opset_import) == list(model.opset_import)
    assert list(made.metadata_props) == list(model.metadata_props)
    assert (made.graph.name, made.graph.doc_string) == (model.graph.name, model.graph.doc_string)
    docs = {node.doc_string for node in model.graph.node}
    assert all(node.doc_string in docs for node in made.graph.node if node.op_type != "Cast")


def reads(node: onnx.NodeProto) -> set[str]:
    """What a node reads, its bodies included; names that a body defines itself are left out."""
    found = set(node.input)
    for body in graphs(node):
        own = {port.name for port in body.input} | {t.name for t in body.initializer}
        own |= {out for inner in body.node for out in inner.output}
        inner_reads = {port.name for port in body.output}.union(*(reads(inner) for inner in body.node))
        found |= inner_reads - own
    return found - {""}


def graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [g for a in node.attribute for g in [*([a.g] if a.HasField("g") else []), *a.graphs]]


def values(proto: onnx.ModelProto) -> Iterable[str]:
    """Every value of the main graph: inputs, initializers, what nodes make."""
    sparse = [s.values.name for s in proto.graph.sparse_initializer]
    ports = [*(p.name for p in proto.graph.input), *(t.name for t in proto.graph.initializer), *sparse]
    return dict.fromkeys([*ports, *(out for node in proto.graph.node for out in node.output if out)])
