"""Options of a command's work: its folder in each attempt, what gives its reward, and its sandbox."""

from __future__ import annotations

from pydantic import Field

from lightning_trainer.options.record import Names, OptionRecord
from lightning_trainer.work import SandboxProgram, Work


class WorkOptions(OptionRecord):
    """Where a command works, and what gives its reward."""

    workdir: str | None = None
    """Folder that is copied for each attempt of a command, or cloned if it is a git repository. Add `@REVISION` to
    start from another commit; `{field}` is replaced by that field of the task. Changes to the files are recorded as a
    span."""
    workdir_size: str = "2GiB"
    """Maximum size of an attempt's copy of workdir; an attempt that exceeds it fails."""
    restore: Names = ()
    """Globs of files in workdir that are restored before reward_command runs, such as `tests/**`."""
    reward_command: str | None = None
    """Command that gives the reward, run in the attempt's work folder after the agent has ended. The reward is 0 unless
    the exit status is 0; then it is x if the last line is {"reward": x}, otherwise 1."""
    reward_timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of reward_command, in seconds. When it is exceeded, the reward is 0."""
    reward_from: str | None = None
    """Where a command writes its reward instead of its last line, so that a printed answer cannot be read as one: `fd`
    (the descriptor whose number is in LIGHTNING_REWARD_FD), or a file in its work folder."""
    reward_range: str = "0,1"
    """Minimum and maximum reward of a command, as LOW,HIGH. An attempt with a reward outside this range has failed."""
    sandbox: SandboxProgram | None = None
    """Run command and reward_command in a sandbox that sees only the work folder and the system's programs, and reaches
    only the gateway. Opened by bubblewrap (`bwrap`), `docker` or `podman`; Linux only."""
    sandbox_image: str | None = None
    """Container image for a docker or podman sandbox. It must be on the machine and have python3."""
    sandbox_read: Names = ()
    """Files and folders of this machine that the sandbox may also read."""
    sandbox_env: Names = ()
    """Environment variables that the sandbox also gets: names, or globs such as `MYAPP_*`."""

    @property
    def work(self) -> Work:
        """Where a command works, and what gives its reward."""
        return Work.of(dict(self))
