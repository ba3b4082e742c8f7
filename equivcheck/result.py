"""What a run says: frozen structs, one for each object of the result schema `equivcheck/1`.

Data only. `check` fills them, `judge` decides, `render` shows them; `to_json` writes them. Not-a-number never enters JSON:
a figure that does not exist is None. Units: LSB is one quantisation step of that tensor, dB decibel, seconds, bytes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from equivcheck.task_figures import TaskFigures

SCHEMA = "equivcheck/1"
RunVerdict = Literal["equivalent", "different", "inconclusive"]
TensorVerdict = Literal["identical", "equivalent", "different", "incomparable", "unjudged"]
Where = Literal["npu", "cpu", "fused"]


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A name and the reason that goes with it (an absent value, a failed step)."""

    name: str
    reason: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    sha256: str
    format: str
    ir_version: int
    opsets: dict[str, int]
    nodes: int
    scheme: str = ""


class FeedInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: list[int]
    sha256: str
    source: str
    recipe: str | None = None


class SampleInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    feeds: list[FeedInfo]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one node ran. `partition` numbers the NPU's subgraphs from 1; `into` names what it was fused into."""

    node: str
    op_type: str
    where: Where
    step: int | None = None
    into: str | None = None
    partition: int | None = None
    reason: str | None = None


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """A stored value that is handed over between NPU and CPU, once per inference."""

    value: str
    bytes: int
    direction: Literal["npu->cpu", "cpu->npu"]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """How values were seen, and whether looking changed the final result (None: not known)."""

    method: str
    disturbed: bool | None = None
    note: str | None = None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of the comparison: an engine, where it ran, and how it was observed.

    `paired`: it ran another tool's file, whose values were paired with the model's.
    """

    spec: str
    engine: str
    version: str
    device: str
    model_sha256: str
    observation: Observation
    placement: list[Placement] = []
    crossings: list[Crossing] = []
    notes: list[str] = []
    warnings: list[str] = []
    paired: bool = False
    timings_s: dict[str, float] = {}


class ChannelExcess(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    excess: float


class ChannelError(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    max_abs: float


class StepError(msgspec.Struct, frozen=True, kw_only=True):
    """E of the schema: one value against the real value of its step. All in LSB, but counts and shares.

    `off`, `max_lsb` and `bias_lsb` are against the correct rounding. `envelope` is what missing values (`merged`) may add.
    `code` and `real` are those of the `worst` element; `exact` says that the real value was evaluated exactly, because the
    rounding of its float32 evaluation could have decided.
    """

    n: int
    excess: float
    worst: list[int]
    worst_channel: ChannelExcess | None
    off: int
    max_lsb: float
    bias_lsb: float
    saturated_share: float
    off_grid: float = 0.0
    merged: list[str] = []
    envelope: float = 0.0
    code: float | None = None
    real: float | None = None
    exact: bool = False


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """METRICS of the schema: two arrays, candidate against reference, in stored units (codes for integers)."""

    n: int
    mismatched: int
    identical: bool
    max_abs: float | None
    argmax: list[int] | None
    mean_abs: float | None
    rmse: float | None
    bias: float | None
    max_lsb: float | None
    bias_lsb: float | None
    cosine: float | None
    snr_db: float | None
    snr_note: Literal["equal", "reference is zero", "empty"] | None
    domain: Literal["real", "codes"]
    nan: list[int]
    inf: list[int]
    nan_mismatch: int
    inf_mismatch: int
    ladder: dict[str, int]
    worst_channel: ChannelError | None = None


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    metric: str
    rule: str
    max: float | None = None
    min: float | None = None


class ValueInfo(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str | None
    shape: list[int] | None
    scale: list[float] | None = None
    zero_point: list[int] | None = None
    axis: int | None = None


class How(msgspec.Struct, frozen=True, kw_only=True):
    reference: str | None
    candidate: str | None


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """This step's error on each side's own inputs, and as second opinions (fed, stress) of the candidate."""

    reference: StepError | None = None
    candidate: StepError | None = None
    fed: StepError | None = None
    stress: StepError | None = None


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    sample: str
    accumulated: Metrics | None
    local: Local


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: a stored value."""

    name: str
    step: int | None
    node: str | None
    op_type: str | None
    roles: list[str]
    aliases: list[str]
    how: How
    reference: ValueInfo
    candidate: ValueInfo
    accumulated: Metrics | None
    local: Local
    verdict: TensorVerdict
    reason: str
    limit: Limit | None
    would_pass_at: dict[str, float] = {}
    would_hide: str | None = None
    unsaturated_share: float | None = None
    silent_channels: int = 0
    channels: int = 0
    by_sample: list[SampleRow] = []


class StepInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    ops: list[str]
    nodes: list[str]
    inputs: list[str]
    outputs: list[str]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a tensor the illegal elements lie; `share` is theirs of all elements."""

    kind: Literal["nowhere", "border", "corner", "stripe", "tile", "channel", "everywhere", "scattered"]
    text: str
    share: float


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What a culprit's error looks like. `explains`: of the illegal elements, how many a recomputation that way gives."""

    kind: str
    evidence: str
    explains: list[int]


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is not legal. `steps` are all that were judged as one with it, because values between were missing."""

    step: int
    steps: list[int]
    node: str
    op_type: str
    outputs: list[str]
    local: Local
    limit: Limit | None
    reason: str
    cause: Cause | None = None
    place: Place | None = None


class SplitPoint(msgspec.Struct, frozen=True, kw_only=True):
    selector: str
    node: str | None
    op_type: str | None
    step: int | None
    before: list[str]
    after: list[str]


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much was judged.

    Of `compared` steps both sides delivered their values, of `bitwise` these are equal. `weak` counts steps whose evidence is
    thin (only clamped values, or channels never used).
    """

    steps: int
    judged: int
    weak: int
    silent_channels: int
    channels: int
    compared: int
    bitwise: int
    absent: list[Named]
    failed: list[Named]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one `diff` or `compare`. `str(result)` is the first screen."""

    schema: str = SCHEMA
    verdict: RunVerdict
    reason: str
    model: Model
    samples: list[SampleInfo]
    reference: Side
    candidate: Side
    coverage: Coverage
    split_points: list[SplitPoint]
    tensors: list[Tensor]
    steps: list[StepInfo]
    first_mismatch: str | None
    first_culprit: int | None
    culprits: list[Culprit]
    reference_culprits: list[Culprit]
    notes: list[str]
    tolerance: str
    again: str
    versions: dict[str, str]
    task: list[TaskFigures] = []

    @property
    def equivalent(self) -> bool:
        return self.verdict == "equivalent"

    def tensor(self, name: str) -> Tensor:
        """Return the row of stored value `name`, or of the value it is an alias of. Raises KeyError."""
        for row in self.tensors:
            if row.name == name or name in row.aliases:
                return row
        raise KeyError(name)

    def to_json(self) -> bytes:
        """Return the result as JSON (UTF-8), indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def __str__(self) -> str:
        from equivcheck.render.text import first_screen  # late: data does not depend on how it is shown

        return first_screen(self)


def from_json(content: bytes) -> Result:
    """Read a result that `Result.to_json` wrote. Raises msgspec.ValidationError where it does not fit the schema."""
    return msgspec.json.decode(content, type=Result)


def schema() -> dict[str, Any]:
    """Return the JSON schema of `Result`, generated from these structs."""
    return msgspec.json.schema(Result)


if __name__ == "__main__":  # `make schema`
    print(msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode())
