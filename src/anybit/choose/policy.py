"""Policy maps on disk: measured times, and what to run because of them.

A map is one JSON file. ``configs`` names every config that won somewhere, by its fields. ``layers`` has two entries per
scheme, dtype and shape: ``built_in``, the token counts at which the built-in choice is the fastest (or ties), with its
microseconds; and ``tokens``, the counts at which another config won, with the microseconds of the built-in choice and
of the best config of each strategy.

A map decides only on the GPU that it names, and a point only if its kernel families still have the revisions that the
map names (``registry.REVISIONS``). Everything else is a hint for searches. Points with unknown families, strategies or
fields are dropped with one warning per map; files that are not maps are ignored with a warning.
"""

import contextlib
import datetime
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anybit.choose.families import FAMILIES, Candidate, FieldValue
from anybit.choose.registry import REVISIONS
from anybit.choose.space import STRATEGIES
from anybit.errors import KernelError, dtype_name
from anybit.jit.cache import folder
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from anybit.version import __version__

FORMAT = "anybit policy map 2"
SHIPPED = Path(__file__).parent / "policies"
_QUANTIZER = "quantize_activations"
_DTYPES = ("float16", "bfloat16")
_COMPARED = "cuBLAS"
"""A strategy in older maps, timed only for comparison and never run."""

Key = tuple[str, str, int, int]
"""Scheme, dtype, N, K."""


class PolicyError(KernelError):
    """A file is not a valid policy map, or cannot be written."""


@dataclass(frozen=True)
class Measured:
    """A measured config: microseconds of a call, activation quantization included."""

    us: float
    kernel: str
    fields: tuple[tuple[str, FieldValue], ...]

    def candidate(self, product: LinearProblem) -> Candidate:
        """The candidate for a product. Raises KernelError, with the reason, if it is not legal there."""
        found = Candidate(self.kernel, FAMILIES[self.kernel].rebuild(product, dict(self.fields)), product.activations)
        reason = found.why_not(product)
        if reason is not None:
            raise KernelError(f"{found.name} cannot run {product}: {reason}")
        return found

    @staticmethod
    def of(candidate: Candidate, us: float) -> "Measured":
        """The record of a candidate's time."""
        return Measured(round(us, 3), candidate.kernel, tuple(candidate.fields.items()))


@dataclass(frozen=True)
class Point:
    """Times of a product at one token count: the built-in choice's, and the best of each strategy.

    Without strategies, the built-in choice is the one to run.
    """

    default_us: float
    strategies: dict[str, Measured] = field(default_factory=dict)

    def ordered(self) -> list[tuple[str, Measured]]:
        """Strategies, fastest first."""
        return sorted(self.strategies.items(), key=lambda item: item[1].us)

    def kernels(self) -> set[str]:
        """The kernel families it has times of."""
        return {measured.kernel for measured in self.strategies.values()}


@dataclass
class Origin:
    """Where a map was measured. kernels: the revision of each family then."""

    gpu: str
    arch: str
    driver: str = ""
    torch: str = ""
    library: str = ""
    kernels: dict[str, int] = field(default_factory=dict)
    date: str = ""

    @staticmethod
    def here(gpu: str, arch: str, driver: str = "", torch_version: str = "") -> "Origin":
        """The origin of measurements on a GPU with this library, today."""
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        return Origin(gpu, arch, driver, torch_version, __version__, dict(REVISIONS), today)

    @property
    def changed(self) -> set[str]:
        """The families whose revision differs now."""
        return {name for name, here in REVISIONS.items() if self.kernels.get(name) != here}


@dataclass
class Policy:
    """A map in memory. excluded: candidates that crashed, hung or gave wrong results, by name, with the reason."""

    origin: Origin
    layers: dict[Key, dict[int, Point]] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    path: Path | None = None

    def put(self, product: LinearProblem, point: Point) -> None:
        """Add a point, replacing an older one."""
        self.layers.setdefault(key_of(product), {})[product.m] = point

    def exact(self, product: LinearProblem) -> Point | None:
        """The point of exactly this product, or None."""
        return self.layers.get(key_of(product), {}).get(product.m)

    def near(self, product: LinearProblem, most: float = 1.0) -> Iterator[tuple[LinearProblem, Point]]:
        """Points of the same scheme with sizes at most ``most`` powers of two away, nearest first."""
        scheme, found = str(product.scheme), []
        for (named, dtype, n, k), points in self.layers.items():
            shape = abs(math.log2(n / product.n)) + abs(math.log2(k / product.k))
            shape += 0.25 * (dtype != dtype_name(product.dtype))
            for m, point in points.items() if named == scheme else ():
                distance = shape + 2 * abs(math.log2(m / product.m))
                if distance <= most:
                    found.append((distance, n, k, m, point))
        for _, n, k, m, point in sorted(found, key=lambda one: one[:4]):
            yield replace(product, m=m, n=n, k=k, columns=0), point

    def merge(self, other: "Policy") -> None:
        """Merge another map into this one; its points win."""
        for key, points in other.layers.items():
            self.layers.setdefault(key, {}).update(points)
        self.excluded |= other.excluded

    def current(self) -> "Policy":
        """The part that still holds: points whose kernels have the same revision now; exclusions only if all have."""
        changed = self.origin.changed
        if not changed:
            return self

        def holds(key: Key, point: Point) -> bool:
            coded = _QUANTIZER in changed and Scheme.parse(key[0]).activations.quantized
            return not coded and not changed & point.kernels()

        layers = {key: {m: one for m, one in points.items() if holds(key, one)} for key, points in self.layers.items()}
        return replace(self, layers={key: points for key, points in layers.items() if points}, excluded={})

    def why_hint(self, gpu: str) -> str | None:
        """Why this map, or a part of it, is only a hint on ``gpu``, as a sentence; None if all of it holds there."""
        if self.origin.gpu != gpu:
            return f"it was measured on {self.origin.gpu}, and this is {gpu}"
        stale = self.points - self.current().points
        if not stale:
            return None
        changed = ", ".join(sorted(self.origin.changed))
        return f"{stale} of its {self.points} points were measured with other kernels than these ({changed})"

    @property
    def points(self) -> int:
        """The number of measured products."""
        return sum(len(points) for points in self.layers.values())


def key_of(product: LinearProblem) -> Key:
    """The key of a product's layer in a map."""
    return str(product.scheme), dtype_name(product.dtype), product.n, product.k


# -------- reading


def read(path: Path) -> Policy:
    """Read a map. Raises PolicyError, naming the file and the fault; warns about points that it drops."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path} cannot be read as a policy map: {error}") from None
    dropped: list[str] = []
    try:
        policy = _parse(content, path, dropped)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, KernelError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise PolicyError(f"{path} is not a valid policy map: {what}") from None
    if dropped:
        warnings.warn(f"{path}: {len(dropped)} points are dropped; the first: {dropped[0]}", stacklevel=3)
    return policy


def _parse(content: Any, path: Path, dropped: list[str]) -> Policy:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    said = content["measured"]
    kernels = {str(name): int(number) for name, number in said["kernels"].items()}
    names = ("gpu", "arch", "driver", "torch", "library", "date")
    origin = Origin(**{name: str(said[name]) for name in names}, kernels=kernels)
    configs = {name: _parse_config(name, fields, origin) for name, fields in content["configs"].items()}
    policy = Policy(origin, path=path)
    policy.excluded = {str(name): str(reason) for name, reason in content["excluded"].items()}
    for layer in content["layers"]:
        scheme, dtype = str(Scheme.parse(layer["scheme"])), layer["dtype"]
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown; there are {', '.join(_DTYPES)}")
        n, k = (_positive(layer[name], whole=True) for name in ("n", "k"))
        points = policy.layers.setdefault((scheme, dtype, n, k), {})
        points |= {_positive(int(m), whole=True): Point(_positive(us)) for m, us in layer["built_in"].items()}
        for m, point in layer["tokens"].items():
            rows = {name: row for name, row in point.items() if name not in ("built_in_us", _COMPARED)}
            strategies, unknown = _parse_strategies(rows, configs)
            if unknown:
                dropped.append(f"{scheme} {m} x {n} x {k}: {unknown[0]}")
            else:
                points[_positive(int(m), whole=True)] = Point(_positive(point["built_in_us"]), strategies)
    return policy


def _parse_config(name: str, fields: dict[str, FieldValue], origin: Origin) -> "tuple[str, Any] | str":
    """(family, fields of its config), or a sentence saying what in it is unknown to this version."""
    if not all(isinstance(value, (int, bool, str)) for value in fields.values()):
        raise ValueError(f"config {name!r} holds something other than an integer, a string or a boolean")
    kernel = name.partition("/")[0]
    if kernel not in FAMILIES:
        return f"there is no kernel family {kernel!r}"
    try:  # fields of kernels that have changed since are not checked
        FAMILIES[kernel].parsed({} if kernel in origin.changed else fields)
    except KernelError as error:
        return str(error)
    return kernel, tuple(fields.items())


def _parse_strategies(rows: dict[str, Any], configs: dict[str, Any]) -> tuple[dict[str, Measured], list[str]]:
    """(the best of each strategy, sentences about what is unknown to this version)."""
    found: dict[str, Measured] = {}
    unknown = [f"strategy {name!r} is none of {', '.join(STRATEGIES)}" for name in rows if name not in STRATEGIES]
    for name, row in rows.items():
        config = configs[row["config"]]
        if isinstance(config, str):
            unknown.append(config)
        else:
            found[name] = Measured(_positive(row["us"]), config[0], config[1])
    return found, unknown


def _positive(value: Any, whole: bool = False) -> Any:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is not a positive {'whole number' if whole else 'number'}")
    return value if whole else float(value)


def usable(path: Path) -> Policy | None:
    """Read a map; None, with a warning that names it, if it is invalid."""
    try:
        return read(path)
    except PolicyError as error:
        warnings.warn(f"{error}; it is ignored", stacklevel=2)
        return None


# -------- writing


def text(policy: Policy) -> str:
    """A map as JSON, with one line per layer, point and config."""
    names: dict[tuple[str, tuple[tuple[str, FieldValue], ...]], str] = {}

    def row(point: Point) -> str:
        found: dict[str, Any] = {"built_in_us": point.default_us}
        for strategy, one in point.ordered():
            count = 1 + sum(kernel == one.kernel for kernel, _ in names)
            name = names.setdefault((one.kernel, one.fields), f"{one.kernel}/{count}")
            found[strategy] = {"us": one.us, "config": name}
        return json.dumps(found)

    layers = []
    for (scheme, dtype, n, k), points in sorted(policy.layers.items()):
        built_in = {str(m): point.default_us for m, point in sorted(points.items()) if not point.strategies}
        lines = [f'\n  "{m}": {row(point)}' for m, point in sorted(points.items()) if point.strategies]
        head = json.dumps({"scheme": scheme, "dtype": dtype, "n": n, "k": k, "built_in": built_in})[:-1]
        layers.append(f'{head}, "tokens": {{{",".join(lines)}}}}}')
    configs = [f" {json.dumps(short)}: {json.dumps(dict(fields))}" for (_, fields), short in names.items()]
    parts = [
        f'"format": {json.dumps(FORMAT)}',
        f'"measured": {json.dumps(vars(policy.origin))}',
        '"excluded": ' + json.dumps(policy.excluded, indent=1),
        '"configs": {\n' + ",\n".join(configs) + "}",
        '"layers": [\n' + ",\n".join(layers) + "]",
    ]
    return "{" + ",\n".join(parts) + "}\n"


def check_target(path: Path) -> None:
    """Raise PolicyError if ``path`` is a file that is not a map, or cannot be written."""
    if path.exists():
        try:
            read(path)
        except PolicyError as error:
            raise PolicyError(f"{error}; it is not overwritten: remove it, or choose another file") from None
    with _locked(path):
        pass


def save(policy: Policy, path: Path) -> None:
    """Merge a map into the file at ``path``, keeping what other processes have written there.

    The file is replaced atomically, under a lock. Points of another GPU or of other kernels are dropped; a file that is
    not a map is renamed to ``.bad``. Raises PolicyError if it cannot be written.
    """
    with _locked(path):
        before = usable(path) if path.exists() else None
        if before is None and path.exists():
            path.replace(path.with_name(f"{path.name}.bad"))
        elif before is not None and before.origin.gpu == policy.origin.gpu:
            before = before.current()
            before.merge(policy)
            policy = replace(before, origin=policy.origin)
        temporary = path.with_name(f".{path.name}.part")  # the lock admits one writer
        try:
            temporary.write_text(text(policy), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a map's lock, across processes; without fcntl the last writer wins.

    Raises PolicyError for an OSError meanwhile.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("ab") as file:
            with contextlib.suppress(ImportError):
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise PolicyError(f"{path} cannot be written: {error.strerror}") from error


def file_name(gpu: str) -> str:
    """The name of a GPU's map: "NVIDIA H200" -> "nvidia-h200.json"."""
    return "".join(c if c.isalnum() else "-" for c in gpu.lower()) + ".json"


def own_file(gpu: str) -> Path:
    """The user's own map of a GPU, in the folder of compiled kernels."""
    return folder() / "policies" / file_name(gpu)
