"""Small OpenEnv servers: guess a number between 0 and 9 by answering; and one with a tool and tasks in splits."""

import os
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str = ""


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed=None, episode_id=None, split=None, index=None, **kwargs):
        self._state = State(step_count=0)
        self._number = ((seed or 0) + (index or 0)) % 10
        return Hint(hint="Guess a number between 0 and 9.")

    def step(self, action, **kwargs):
        self._state.step_count += 1
        right = action.guess == self._number
        hint = "right" if right else "higher" if action.guess < self._number else "lower"
        return Hint(hint=hint, reward=1.0 if right else -0.1, done=right)

    @property
    def state(self):
        return self._state


class Listed(Numbers):
    def list_splits(self):
        return ["train", "test"]

    def list_tasks(self, split):
        return [{"index": index} for index in range(self.num_tasks(split))]

    def num_tasks(self, split):
        return {"train": 5, "test": 3}[split]

    def get_task(self, split, index):
        return {"index": index}

    def get_task_range(self, split, start=None, stop=None):
        return self.list_tasks(split)[start:stop]


def tools():
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Doubling(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            mcp = FastMCP("doubling")

            @mcp.tool
            def double(number: int) -> int:
                """Double a number."""
                return 2 * number

            super().__init__(mcp)
            self._state = State()

        def reset(self, seed=None, episode_id=None, **kwargs):
            self._state = State(step_count=0)
            return Observation(metadata={"ask": "Double 21 with the tool."})

        async def step_async(self, action, timeout_s=None, **kwargs):
            observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
            if isinstance(action, CallToolAction):
                observation.reward = float(action.arguments == {"number": 21})
            return observation

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return Observation()

        @property
        def state(self):
            return self._state

    return create_app(Doubling, CallToolAction, CallToolObservation, env_name="doubling", max_concurrent_envs=8)


if __name__ == "__main__":
    kind, socket = sys.argv[1], int(sys.argv[2])
    if kind == "tools":
        app = tools()
    else:
        app = create_app(
            Listed if kind == "listed" else Numbers, Guess, Hint, env_name="numbers", max_concurrent_envs=8
        )
    config = uvicorn.Config(app, fd=socket, log_level="warning")
    uvicorn.Server(config).run()
    os._exit(0)
