"""What the operating system lets this process have."""

import resource

MOST_DESCRIPTORS = 65_536


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files as far as is allowed: a conversation needs about five."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
