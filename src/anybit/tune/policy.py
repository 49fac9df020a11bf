"""Policy maps: what was measured, on disk, and what to run by it.

A map is one readable JSON file. ``configs`` names every config that won somewhere, by its fields; ``layers`` holds, for
each scheme, dtype and shape, the measured token counts, and for each of these microseconds of the built-in choice, of
the best config of every strategy, and of reading the operands once (``floor_us``).

A map is obeyed only where it was measured: on the GPU that it names, with the kernels that it names (a fingerprint of
each family's sources; a point holds while those of all kernels that it names are unchanged). The rest is a hint: a
search starts from it, nothing runs by it. A file that cannot be read as a map is named in a warning and ignored.
"""

import contextlib
import datetime
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anybit.errors import KernelError, dtype_name
from anybit.jit.cache import folder
from anybit.scheme import Scheme
from anybit.tune.registry import (
    FAMILIES,
    REVISIONS,
    FieldValue,
    LinearProblem,
)
from anybit.tune.space import STRATEGIES, VENDOR, Candidate, strategy_of

FORMAT = "anybit policy map 1"
SHIPPED = Path(__file__).parent / "policies"
_QUANTIZER = "quantize_activations"
_DTYPES = ("float16", "bfloat16")

Key = tuple[str, str, int, int]
"""Scheme, dtype, N, K."""


class PolicyError(KernelError):
    """A file that is not a policy map, or not a whole one."""


@dataclass(frozen=True)
class Measured:
    """One config as it was measured: microseconds of a call, quantization included."""

    us: float
    kernel: str
    fields: tuple[tuple[str, FieldValue], ...]
    activations: str = ""
    """What 16-bit activations were quantized to, as in a scheme ("8", "8fp"); empty: the scheme's own."""

    def candidate(self, product: LinearProblem) -> Candidate:
        """The config for a product, known to be legal there. Raises KernelError, in a sentence, where it is not."""
        activations = product.activations
        if self.activations:
            activations = Scheme.parse(f"w8a{self.activations}").activations
        if self.kernel == VENDOR:
            return Candidate(VENDOR, VENDOR, None, activations)
        effective = replace(product, activations=activations)
        config = FAMILIES[self.kernel].rebuild(effective, dict(self.fields))
        found = Candidate(strategy_of(activations, self.kernel, config), self.kernel, config, activations)
        reason = found.why_not(product)
        if reason is not None:
            raise KernelError(f"{found.name} cannot run {product}: {reason}")
        return found

    @staticmethod
    def of(candidate: Candidate, product: LinearProblem, us: float) -> "Measured":
        """What is written down of a candidate."""
        text = ""
        if candidate.activations != product.activations:
            text = "8" if candidate.activations.integer else "8fp"
        return Measured(round(us, 3), candidate.kernel, tuple(candidate.fields.items()), text)


@dataclass(frozen=True)
class Point:
    """What is known of a product at one token count. ``strategies``: the best of each that was timed."""

    default_us: float
    floor_us: float
    strategies: dict[str, Measured]
    default: Measured | None = None
    """The built-in choice that took ``default_us``; where another is built in now, the point no longer decides."""
    also: tuple[Measured, ...] = ()
    """What won no strategy, but is expected to win one at token counts between this one and the next measured ones."""

    def ordered(self) -> list[tuple[str, Measured]]:
        """Strategies, the fastest first."""
        return sorted(self.strategies.items(), key=lambda item: item[1].us)

    def named(self) -> tuple[Measured, ...]:
        """All configs that it names."""
        return (*self.strategies.values(), *self.also, *(() if self.default is None else (self.default,)))

    def kernels(self) -> set[str]:
        """The kernels that it holds times of."""
        return {measured.kernel for measured in self.named()}


@dataclass
class Origin:
    """Where a map was measured."""

    gpu: str
    arch: str
    driver: str = ""
    torch: str = ""
    library: str = ""
    kernels: dict[str, int] = field(default_factory=dict)
    """The revision of each family of kernels."""
    date: str = ""

    @staticmethod
    def here(gpu: str, arch: str, driver: str = "", torch_version: str = "") -> "Origin":
        """What is measured on a GPU with this library, today."""
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        return Origin(gpu, arch, driver, torch_version, library(), dict(revisions()), today)

    def foreign(self, gpu: str) -> str | None:
        """Why a map from here is but a hint on ``gpu``, in a sentence; None if it holds there."""
        if self.gpu != gpu:
            return f"it was measured on {self.gpu}, and this is {gpu}"
        return None

    @property
    def changed(self) -> set[str]:
        """The families whose kernels are other ones now."""
        return {name for name, here in revisions().items() if self.kernels.get(name) != here}


@dataclass
class Policy:
    """A map in memory."""

    origin: Origin
    layers: dict[Key, dict[int, Point]] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    """Candidates that crashed, hung or were wrong, by name, and what happened."""
    path: Path | None = None

    def put(self, product: LinearProblem, point: Point) -> None:
        """Write a point down; it replaces an older one."""
        self.layers.setdefault(key_of(product), {})[product.m] = point

    def exact(self, product: LinearProblem) -> Point | None:
        """What was measured for exactly this product."""
        return self.layers.get(key_of(product), {}).get(product.m)

    def near(self, product: LinearProblem, most: float = 1.0) -> Iterator[tuple[float, Key, int, Point]]:
        """Points of the same scheme whose shapes are not far (in powers of two), the nearest first."""
        scheme = str(product.scheme)
        found = []
        for key, points in self.layers.items():
            if key[0] != scheme:
                continue
            shape = abs(math.log2(key[2] / product.n)) + abs(math.log2(key[3] / product.k))
            shape += 0.25 * (key[1] != dtype_name(product.dtype))
            for m, point in points.items():
                distance = shape + 2 * abs(math.log2(m / product.m))
                if distance <= most:
                    found.append((distance, key, m, point))
        yield from sorted(found, key=lambda item: item[:3])

    def merge(self, other: "Policy") -> None:
        """Take over what another map holds; its points replace older ones."""
        for key, points in other.layers.items():
            self.layers.setdefault(key, {}).update(points)
        self.excluded |= other.excluded

    def current(self) -> "Policy":
        """What of it still holds: points and exclusions whose kernels are the same now."""
        changed = self.origin.changed
        if not changed:
            return self
        found = replace(self, layers={}, excluded={})
        for key, points in self.layers.items():
            if _QUANTIZER in changed and Scheme.parse(key[0]).activations.quantized:
                continue
            kept = {m: point for m, point in points.items() if not changed & _kernels(point)}
            if kept:
                found.layers[key] = kept
        for name, reason in self.excluded.items():
            coded = _QUANTIZER in changed and "a16" not in name.partition(" ")[0]
            if not coded and not any(f" {kernel}(" in name for kernel in changed):
                found.excluded[name] = reason
        return found

    def why_hint(self, gpu: str) -> str | None:
        """Why it, or a part of it, is but a hint on ``gpu``, in a sentence; None if all of it holds there."""
        foreign = self.origin.foreign(gpu)
        stale = self.points - self.current().points
        if foreign is not None or not stale:
            return foreign
        changed = ", ".join(sorted(self.origin.changed))
        return f"{stale} of its {self.points} points were measured with other kernels than these ({changed})"

    @property
    def points(self) -> int:
        """How many products were measured."""
        return sum(len(points) for points in self.layers.values())


def _kernels(point: Point) -> set[str]:
    """The kernels whose change makes a point a hint."""
    found = point.kernels()
    return found | {_QUANTIZER} if any(measured.activations for measured in point.strategies.values()) else found


def key_of(product: LinearProblem) -> Key:
    """What a layer is called in a map."""
    return str(product.scheme), dtype_name(product.dtype), product.n, product.k


def library() -> str:
    """The version of anybit."""
    from anybit import __version__

    return __version__


def revisions() -> dict[str, int]:
    """The revision of each linear family's device code, and of the quantizer's (``registry.REVISIONS``)."""
    return dict(REVISIONS)


# -------- reading


def read(path: Path) -> Policy:
    """Read a map. Raises PolicyError, naming the file and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path} cannot be read as a policy map: {error}") from None
    try:
        return _parse(content, path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, KernelError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise PolicyError(f"{path} is not a whole policy map: {what}") from None


def _parse(content: Any, path: Path) -> Policy:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    names = ("gpu", "arch", "driver", "torch", "library", "date")
    said = content["measured"]
    families = said["kernels"] if isinstance(said["kernels"], dict) else {}
    origin = Origin(**{name: str(said[name]) for name in names}, kernels={str(k): int(v) for k, v in families.items()})
    configs: dict[str, tuple[str, tuple[tuple[str, FieldValue], ...]]] = {}
    for name, fields in content["configs"].items():
        kernel = name.partition("/")[0]
        if kernel not in FAMILIES and kernel != VENDOR:
            raise ValueError(f"config {name!r} names a kernel that does not exist; choose from {', '.join(FAMILIES)}")
        if not all(isinstance(value, (int, bool, str)) for value in fields.values()):
            raise ValueError(f"config {name!r} holds something other than a number, a string or a boolean")
        if kernel in FAMILIES and kernel not in origin.changed:  # of other kernels it is but a hint
            FAMILIES[kernel].parsed(fields)
        configs[name] = kernel, tuple(fields.items())
    policy = Policy(origin, path=path)
    for layer in content["layers"]:
        scheme = Scheme.parse(layer["scheme"])
        if layer["dtype"] not in _DTYPES:
            raise ValueError(f"dtype {layer['dtype']!r} is unknown; there are {', '.join(_DTYPES)}")
        key = str(scheme), layer["dtype"], _positive(layer["n"], int), _positive(layer["k"], int)
        points = policy.layers.setdefault(key, {})
        for m, point in layer["tokens"].items():
            points[_positive(int(m), int)] = _parse_point(point, configs)
    policy.excluded = {str(name): str(reason) for name, reason in content["excluded"].items()}
    return policy


def _parse_point(point: dict[str, Any], configs: dict[str, Any]) -> Point:
    strategies = {}
    for name, measured in point.items():
        if name in ("default_us", "floor_us", "default", "also"):
            continue
        if name not in STRATEGIES:
            raise ValueError(f"strategy {name!r} is unknown; there are {', '.join(STRATEGIES)}")
        kernel, fields = configs[measured["config"]]
        activations = str(measured.get("activations", ""))
        if activations not in ("", "8", "8fp"):
            raise ValueError(f"activations become 8 or 8fp bits, not {activations!r}")
        strategies[name] = Measured(_positive(measured["us"], float), kernel, fields, activations)
    default_us, default = _positive(point["default_us"], float), None
    if "default" in point:
        kernel, fields = configs[point["default"]]
        default = Measured(default_us, kernel, fields)
    also = tuple(Measured(_positive(us, float), *configs[name]) for name, us in point.get("also", {}).items())
    return Point(default_us, _positive(point["floor_us"], float), strategies, default, also)


def _positive(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is not a positive number")
    if kind is int and not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number")
    return kind(value)


def usable(path: Path) -> Policy | None:
    """Read a map that may be wrong: None, and a warning that names it, where it is."""
    try:
        return read(path)
    except PolicyError as error:
        warnings.warn(f"{error}; it is ignored", stacklevel=2)
        return None


# -------- writing


def text(policy: Policy) -> str:
    """A map as JSON, a layer's token count a line."""
    names: dict[tuple[str, tuple[tuple[str, FieldValue], ...]], str] = {}
    counts: dict[str, int] = {}

    def name(measured: Measured) -> str:
        key = measured.kernel, measured.fields
        if key not in names:
            counts[measured.kernel] = counts.get(measured.kernel, 0) + 1
            names[key] = f"{measured.kernel}/{counts[measured.kernel]}" if measured.fields else measured.kernel
        return names[key]

    layers = []
    for (scheme, dtype, n, k), points in sorted(policy.layers.items()):
        lines = []
        for m, point in sorted(points.items()):
            row: dict[str, Any] = {"default_us": point.default_us, "floor_us": point.floor_us}
            if point.default is not None:
                row["default"] = name(point.default)
            for strategy, measured in point.ordered():
                row[strategy] = {"us": measured.us, "config": name(measured)}
                if measured.activations:
                    row[strategy]["activations"] = measured.activations
            if point.also:
                row["also"] = {name(measured): measured.us for measured in point.also}
            lines.append(f'  "{m}": {json.dumps(row)}')
        head = json.dumps({"scheme": scheme, "dtype": dtype, "n": n, "k": k})[:-1]
        layers.append(head + ', "tokens": {\n' + ",\n".join(lines) + "}}")
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
    """Raise PolicyError where a map is not to be written: over a file that is none, or where nothing can be written."""
    if path.exists():
        try:
            read(path)
        except PolicyError as error:
            raise PolicyError(f"{error}; it is not overwritten: remove it, or choose another file") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            pass
    except OSError as error:
        raise PolicyError(f"{path} cannot be written: {error.strerror}") from None


def save(policy: Policy, path: Path) -> None:
    """Merge a map into the file at ``path``, so that what another process has written there is kept.

    The file is replaced as a whole, under a lock. What was there of another GPU or other kernels is dropped; a file
    that is no map is kept beside it (``.bad``). Raises PolicyError where it cannot be written.
    """
    try:
        _save(policy, path)
    except OSError as error:
        raise PolicyError(f"{path} cannot be written: {error.strerror}") from error


def _save(policy: Policy, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        whole = policy
        if path.exists():
            before = usable(path)
            if before is None:
                path.replace(path.with_name(f"{path.name}.bad"))
            elif before.origin.foreign(policy.origin.gpu) is None:
                before = before.current()
                before.merge(policy)
                before.origin = policy.origin
                whole = before
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text(whole))
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a map, across processes."""
    with path.with_name(f".{path.name}.lock").open("ab") as file:
        with contextlib.suppress(ImportError):  # where there is no fcntl, the last one to write wins
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_name(gpu: str) -> str:
    """The name of a GPU's map: "NVIDIA H200" -> "nvidia-h200.json"."""
    return "".join(c if c.isalnum() else "-" for c in gpu.lower()) + ".json"


def own_file(gpu: str) -> Path:
    """Where a user's searches are kept: beside the compiled kernels."""
    return folder() / "policies" / file_name(gpu)
