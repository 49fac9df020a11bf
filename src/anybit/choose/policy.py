"""Policy maps on disk: what was measured, from which every choice follows.

A map is one JSON file. ``fields`` names the tunable fields of each kernel, ``configs`` lists configs by their values.
``layers`` has an entry per scheme, dtype and shape: at each token count the microseconds of what ran before the
measurement (``default``), and of the best config of each strategy.

A map decides only on the GPU that it names; on others its points are neighbours to choose by. A point is void, and
dropped with one warning per map, if its kernel is unknown, or a field of its config is unknown or missing. Machine code
may change: releases measure again. Files that are not maps are ignored with a warning.
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

from anybit.choose.families import FAMILIES, STRATEGIES, Candidate, FieldValue
from anybit.device import Device
from anybit.errors import KernelError, dtype_name
from anybit.jit.cache import folder
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from anybit.version import __version__

FORMAT = "anybit policy map 3"
SHIPPED = Path(__file__).parent / "policies"
_DTYPES = ("float16", "bfloat16")

Key = tuple[str, str, int, int]
"""Scheme, dtype, N, K."""
_Config = tuple[str, tuple[tuple[str, FieldValue], ...]]
"""A kernel family, and the fields of a config."""


class PolicyError(KernelError):
    """A file is not a valid policy map, or cannot be written."""


@dataclass(frozen=True)
class Measured:
    """A measured config: microseconds of a call, activation quantization included."""

    us: float
    kernel: str
    fields: tuple[tuple[str, FieldValue], ...]

    def rebuilt(self, product: LinearProblem) -> Candidate:
        """The candidate for a product; not checked to be legal there."""
        return Candidate(self.kernel, FAMILIES[self.kernel].rebuild(product, dict(self.fields)), product.activations)

    def candidate(self, product: LinearProblem) -> Candidate:
        """The candidate for a product. Raises KernelError, with the reason, if it is not legal there."""
        found = self.rebuilt(product)
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
    """Times of a product at one token count: of what ran before it was measured, and the best of each strategy."""

    default_us: float
    strategies: dict[str, Measured] = field(default_factory=dict)


@dataclass
class Origin:
    """Where and when a map was measured."""

    gpu: str
    arch: str
    driver: str = ""
    torch: str = ""
    library: str = ""
    date: str = ""

    @staticmethod
    def here(gpu: str, arch: str, driver: str = "", torch_version: str = "") -> "Origin":
        """The origin of measurements on a GPU with this library, today."""
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        return Origin(gpu, arch, driver, torch_version, __version__, today)


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

    def merge(self, other: "Policy") -> None:
        """Merge another map into this one; its points win."""
        for key, points in other.layers.items():
            self.layers.setdefault(key, {}).update(points)
        self.excluded |= other.excluded

    def why_hint(self, gpu: str) -> str | None:
        """Why this map only offers neighbours on ``gpu``, as a sentence; None if it holds there."""
        return None if self.origin.gpu == gpu else f"it was measured on {self.origin.gpu}, and this is {gpu}"

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
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, KernelError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise PolicyError(f"{path} is not a valid policy map: {what}") from None
    if dropped:
        warnings.warn(f"{path}: {len(dropped)} points are dropped; the first: {dropped[0]}", stacklevel=3)
    return policy


def _parse(content: Any, path: Path, dropped: list[str]) -> Policy:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    said = content["measured"]
    origin = Origin(**{name: str(said[name]) for name in ("gpu", "arch", "driver", "torch", "library", "date")})
    Device.named(origin.arch)  # raises for an unknown one
    configs = [_parse_config(kernel, content["fields"][kernel], values) for kernel, *values in content["configs"]]
    policy = Policy(origin, path=path)
    policy.excluded = {str(name): str(reason) for name, reason in content["excluded"].items()}
    for layer in content["layers"]:
        scheme, dtype = str(Scheme.parse(layer["scheme"])), layer["dtype"]
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown; there are {', '.join(_DTYPES)}")
        n, k = (_positive(layer[name], whole=True) for name in ("n", "k"))
        points = policy.layers.setdefault((scheme, dtype, n, k), {})
        for m, row in layer["tokens"].items():
            default_us = _positive(row.pop("default"))
            strategies, unknown = _strategies(row, configs)
            if unknown:
                dropped.append(f"{scheme} {m} x {n} x {k}: {unknown[0]}")
            else:
                points[_positive(int(m), whole=True)] = Point(default_us, strategies)
    return policy


def _parse_config(kernel: str, names: list[str], values: list[FieldValue]) -> _Config | str:
    """(family, fields of its config), or a sentence saying why the config is void in this version."""
    if not all(isinstance(value, (int, bool, str)) for value in values):
        raise ValueError(f"a config of {kernel!r} holds something other than an integer, a string or a boolean")
    fields = dict(zip(names, values, strict=True))
    if kernel not in FAMILIES:
        return f"there is no kernel family {kernel!r}"
    try:
        FAMILIES[kernel].parsed(fields)
    except KernelError as error:
        return str(error)
    return kernel, tuple(fields.items())


def _strategies(row: dict[str, Any], configs: list[_Config | str]) -> tuple[dict[str, Measured], list[str]]:
    """(the best of each strategy, sentences about what is unknown to this version)."""
    found = dict[str, Measured]()
    unknown = [f"strategy {name!r} is none of {', '.join(STRATEGIES)}" for name in row if name not in STRATEGIES]
    for name, (us, index) in row.items():
        config = configs[_positive(index + 1, whole=True) - 1]
        if isinstance(config, str):
            unknown.append(config)
        else:
            found[name] = Measured(_positive(us), *config)
    return found, unknown


def _positive(value: object, whole: bool = False) -> Any:
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
    """A map as JSON, with one line per layer and config."""
    numbers: dict[_Config, int] = {}

    def row(point: Point) -> dict[str, object]:
        fastest = sorted(point.strategies.items(), key=lambda item: item[1].us)
        best: dict[str, object] = {
            name: [one.us, numbers.setdefault((one.kernel, one.fields), len(numbers))] for name, one in fastest
        }
        return {"default": point.default_us} | best

    layers = [
        {"scheme": scheme, "dtype": dtype, "n": n, "k": k, "tokens": {str(m): row(points[m]) for m in sorted(points)}}
        for (scheme, dtype, n, k), points in sorted(policy.layers.items())
    ]
    fields = {kernel: [name for name, _ in values] for kernel, values in numbers}
    configs = [[kernel, *(value for _, value in values)] for kernel, values in numbers]
    parts = [
        f'"format": {json.dumps(FORMAT)}',
        f'"measured": {json.dumps(vars(policy.origin))}',
        '"excluded": ' + json.dumps(policy.excluded, indent=1),
        f'"fields": {json.dumps(fields)}',
        *(
            f'"{name}": [\n' + ",\n".join(map(json.dumps, some)) + "]"
            for name, some in (("configs", configs), ("layers", layers))
        ),
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

    The file is replaced atomically, under a lock. Points of another GPU and void ones are dropped; a file that is not a
    map is renamed to ``.bad``. Raises PolicyError if it cannot be written.
    """
    with _locked(path):
        before = usable(path) if path.exists() else None
        if before is None and path.exists():
            path.replace(path.with_name(f"{path.name}.bad"))
        elif before is not None and before.origin.gpu == policy.origin.gpu:
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
