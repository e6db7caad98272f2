"""Takes values apart into plain JSON data and named tensors, and puts them together again.

Values that JSON cannot express are written as an object with one key that begins with ``$``, like
``{"$tensor": "model/weight"}``. Only plain data is taken: nothing here runs code when it is
read, which is what makes a checkpoint safe to load.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch

from tensorwire.checkpoint.errors import DamagedCheckpointError, UnsavableValueError

Json: TypeAlias = Any
"""A value as ``json.loads`` returns it."""

_DTYPES: Final = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def encode(value: Any, name: str, put: Callable[[str, torch.Tensor], object]) -> Json:
    """Takes a value apart.

    Args:
        value: tensors and plain data, nested in dicts, lists and tuples.
        name: of the value; names of tensors in it begin with it.
        put: called with each tensor and its name.

    Raises:
        UnsavableValueError: something in the value is neither a tensor nor plain data.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case torch.Tensor():
            return _encode_tensor(value, name, put)
        case Mapping():
            return _encode_mapping(value, name, put)
        case torch.Size():
            return {"$size": list(value)}
        case list():
            return [encode(each, f"{name}/{n}", put) for n, each in enumerate(value)]
        case tuple():
            return {"$tuple": [encode(each, f"{name}/{n}", put) for n, each in enumerate(value)]}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case complex():
            return {"$complex": repr(value)}
        case torch.dtype():
            return {"$dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"$device": str(value)}
    raise UnsavableValueError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds "
        "tensors and plain data (numbers, text, bytes, None, and dicts, lists and tuples of these)"
    )


def decode(document: Json, get: Callable[[str], torch.Tensor]) -> Any:
    """Puts together what :func:`encode` took apart.

    Args:
        document: what it returned.
        get: returns the tensor of a name.

    Raises:
        DamagedCheckpointError: it returned nothing like this.
    """
    if isinstance(document, list):
        return [decode(each, get) for each in document]
    if not isinstance(document, dict):
        return document
    mark = next(iter(document), "")
    if len(document) == 1 and mark.startswith("$"):
        return _decode_marked(mark, document[mark], get)
    return {key: decode(each, get) for key, each in document.items()}


def _encode_tensor(
    tensor: torch.Tensor, name: str, put: Callable[[str, torch.Tensor], object]
) -> Json:
    tensor = tensor.detach()
    if tensor.is_complex():
        put(name, torch.view_as_real(tensor.resolve_conj()))
        return {"$complex_tensor": name}
    put(name, tensor)
    return {"$tensor": name}


def _encode_mapping(
    value: Mapping[Any, Any], name: str, put: Callable[[str, torch.Tensor], object]
) -> Json:
    items = [(key, encode(each, f"{name}/{key}", put)) for key, each in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
        return dict(items)
    return {"$dict": [[encode(key, f"a key of {name}", _refuse), each] for key, each in items]}


def _refuse(name: str, tensor: torch.Tensor) -> None:
    raise UnsavableValueError(f"{name} is a tensor, which cannot be a key")


def _decode_marked(mark: str, body: Json, get: Callable[[str], torch.Tensor]) -> Any:
    match mark, body:
        case "$tensor", str():
            return get(body)
        case "$complex_tensor", str():
            return torch.view_as_complex(get(body))
        case "$tuple", list():
            return tuple(decode(each, get) for each in body)
        case "$size", list():
            return torch.Size(body)
        case "$dict", list():
            return {_as_key(decode(key, get)): decode(each, get) for key, each in body}
        case "$float", "inf" | "-inf" | "nan":
            return float(body)
        case "$bytes", str():
            return base64.b64decode(body)
        case "$complex", str():
            return complex(body)
        case "$dtype", str() if body in _DTYPES:
            return _DTYPES[body]
        case "$device", str():
            return torch.device(body)
    raise DamagedCheckpointError(f"{mark!r} with {body!r} means nothing")


def _as_key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
