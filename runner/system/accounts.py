"""Look up users and groups of this machine."""

from __future__ import annotations

import grp
import pwd

from runner.system import processes


def user_name(uid: int) -> str:
    """Return the name of a user, or the user id as text if it has no name on this machine, such as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_private_group(gid: int) -> bool:
    """Check whether only this user is in a group, so that a umask of 002 gives nothing to others.

    Such a group has the user's name and no other member. If names are unknown, its number is the user's number.
    """
    user = user_name(processes.effective_user_id())
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == processes.effective_user_id()
    return group.gr_name == user and not set(group.gr_mem) - {user}
