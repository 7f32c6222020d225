"""Where commands run. A new backend is one file here and one line in SANDBOXES; the contract is in `base`."""

from importlib import import_module

from toolsets.sandboxes.base import Sandbox, SandboxError, SandboxSpec

SANDBOXES = {
    "bubblewrap": "toolsets.sandboxes.bubblewrap:BubblewrapSandbox",
    "local": "toolsets.sandboxes.local:LocalSandbox",
}
"""Name -> where its class is; imported when it is asked for."""
AUTO = "auto"


def sandbox_class(name: str) -> type[Sandbox]:
    """The backend of a name.

    Raises:
        ValueError: no backend has that name.
    """
    if name not in SANDBOXES:
        known = ", ".join([AUTO, *sorted(SANDBOXES)])
        raise ValueError(f"unknown sandbox {name!r}; known: {known}")
    module_name, _, class_name = SANDBOXES[name].partition(":")
    found: type[Sandbox] = getattr(import_module(module_name), class_name)
    return found


def new_sandbox(name: str, spec: SandboxSpec) -> Sandbox:
    """A sandbox of the named backend, not yet started. Raises ValueError when there is none of that name."""
    return sandbox_class(name)(spec)


def choose(name: str = AUTO) -> tuple[str, str]:
    """Settle on a backend before a run starts; blocking, since it tries the backend out.

    Args:
        name: A name of SANDBOXES, or `auto`: bubblewrap where it works, else local.

    Returns:
        The backend's name, and the sentence to print about it.

    Raises:
        ValueError: no backend has that name.
        SandboxError: the backend does not work here.
    """
    if name != AUTO:
        available = sandbox_class(name).availability()
        if not available.works:
            raise SandboxError(f"the {name} sandbox does not work here: {available.detail}", permanent=True)
        return name, f"Sandbox {name}: {available.detail}"
    isolating = sandbox_class("bubblewrap").availability()
    if isolating.works:
        return "bubblewrap", f"Sandbox bubblewrap: {isolating.detail}"
    _, sentence = choose("local")
    return "local", f"{sentence} (bubblewrap does not work here: {isolating.detail})"
