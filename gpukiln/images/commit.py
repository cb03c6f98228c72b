"""The commit that this gpukiln is of."""

from __future__ import annotations

from pathlib import Path

from gpukiln import programs, recipes
from gpukiln.errors import UnavailableError

COMMIT_FILE = recipes.PACKAGE / "_commit"  # scripts/build_hook.py writes it into a wheel


def source_commit() -> str:
    """The commit of this checkout, or that a wheel was built of; empty: not known."""
    if recipes.is_checkout():
        return git_commit(recipes.root()) or ""
    return COMMIT_FILE.read_text(encoding="utf-8").strip() if COMMIT_FILE.is_file() else ""


def git_commit(root: Path) -> str | None:
    """The commit of a checkout; what is installed has none, whatever repository it is in.

    Returns:
        The commit, with -dirty when files differ from it; None where there is none.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = programs.run(["git", "-C", str(root), *arguments], limit_s=programs.QUICK_S)
        except (OSError, UnavailableError):
            return None
        return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None

    if not recipes.is_checkout():
        return None
    commit = git("rev-parse", "--verify", "-q", "HEAD")
    return f"{commit}-dirty" if commit and git("status", "--porcelain") else commit
