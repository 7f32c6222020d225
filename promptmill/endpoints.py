"""Where requests go, and which key may go there."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from promptmill.errors import ConfigError

KEY_VARIABLE_BY_HOST = {
    "openrouter.ai": "OPENROUTER_API_KEY",
    "api.openai.com": "OPENAI_API_KEY",
    "api.anthropic.com": "ANTHROPIC_API_KEY",
    "api.deepseek.com": "DEEPSEEK_API_KEY",
    "api.mistral.ai": "MISTRAL_API_KEY",
    "api.groq.com": "GROQ_API_KEY",
    "api.together.xyz": "TOGETHER_API_KEY",
    "api.fireworks.ai": "FIREWORKS_API_KEY",
    "api.x.ai": "XAI_API_KEY",
    "api.cerebras.ai": "CEREBRAS_API_KEY",
    "api.moonshot.ai": "MOONSHOT_API_KEY",
    "dashscope-intl.aliyuncs.com": "DASHSCOPE_API_KEY",
    "generativelanguage.googleapis.com": "GEMINI_API_KEY",
    "inference-api.nousresearch.com": "NOUS_API_KEY",
}
"""A key from the environment goes to the host it belongs to and to no other."""

NO_KEY = "none-needed"
"""Sent where no key is needed, since the client library insists on one."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go."""

    base_url: str
    api_key: str = field(repr=False)
    traits: frozenset[str] = frozenset()
    """What is known of the server beyond its address, e.g. `no_tool_template`."""

    @property
    def host(self) -> str:
        """Host name in lower case, without the port."""
        return (urlsplit(self.base_url).hostname or "").lower()

    def is_at(self, domain: str) -> bool:
        """Whether the host is a domain or below it."""
        return _belongs_to(self.host, domain)


def endpoint_for(base_url: str, api_key: str, environ: Mapping[str, str]) -> Endpoint:
    """The endpoint and the key that goes to it.

    A key given by flag goes wherever the user sends it. One from the environment goes only to the host it belongs
    to, and only over TLS. A loopback or private address needs none.

    Raises:
        ConfigError: the URL is none, or the host needs a key and there is none.
    """
    url = _checked_url(base_url)
    host = (url.hostname or "").lower()
    if api_key:
        return Endpoint(base_url.rstrip("/"), _checked_key("--api_key", api_key))
    variable = key_variable(host)
    key = environ.get(variable, "").strip() if url.scheme == "https" or is_private(host) else ""
    if not key and not is_private(host):
        if url.scheme != "https" and environ.get(variable, "").strip():
            raise ConfigError(f"{variable} is not sent to {host} unencrypted: write --base_url=https://…")
        hint = "" if url.scheme == "https" else " and an https:// address"
        raise ConfigError(f"no key for {host}: set {variable} in the environment{hint}, or give --api_key")
    return Endpoint(base_url.rstrip("/"), _checked_key(variable, key) if key else NO_KEY)


def _checked_key(source: str, key: str) -> str:
    """A key that can stand in a header. The complaint does not show it."""
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source} is no key: it is blank, or holds a space or a character outside ASCII")
    return key


def _checked_url(base_url: str) -> SplitResult:
    try:
        url = urlsplit(base_url)
        port_is_valid = url.port is None or 0 < url.port < 65536
    except ValueError as exc:
        raise ConfigError(f"--base_url={base_url}: {exc}") from exc
    if url.scheme not in ("http", "https") or not url.hostname or not port_is_valid:
        raise ConfigError(f"--base_url={base_url} is no address; e.g. --base_url=http://127.0.0.1:8000/v1")
    if url.username or url.password:
        raise ConfigError("--base_url must not contain a user or password; give --api_key instead")
    if url.path.rstrip("/").endswith("/chat/completions"):
        raise ConfigError(f"--base_url={base_url}: leave out /chat/completions, which is added to it")
    if url.query or url.fragment:
        # It would be kept in `run.json`, and is where some gateways want a key.
        raise ConfigError("--base_url must end with its path, without ? or #; give a key as --api_key")
    return url


def key_variable(host: str) -> str:
    """The environment variable whose key belongs to a host.

    For a host that is not in our table it is made from the whole host name, so that a look-alike such as
    `api.openai.com.example.org` never gets the key of another, nor a container called `cohere` that of Cohere.
    """
    for known, variable in KEY_VARIABLE_BY_HOST.items():
        if _belongs_to(host, known):
            return variable
    return f"HOST_{re.sub(r'[^A-Z0-9]', '_', host.upper().replace('-', '__'))}_API_KEY"


def _belongs_to(host: str, domain: str) -> bool:
    return host == domain or host.endswith("." + domain)


def is_private(host: str) -> bool:
    """Whether a host is this machine or on a private network, by its literal name or address."""
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host
    return address.is_private or address.is_loopback or address.is_link_local
