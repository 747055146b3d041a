"""Schedules that give each block the policy that recomputes least within the memory that a division leaves free."""

from dataclasses import replace
from functools import cache

from ditkit_core.engine.ac_policies import Policy
from ditkit_core.errors import UserError
from ditkit_core.planner.ac_budget import BudgetTask, choose
from ditkit_core.planner.memory import Budget, Partition, Profile, compose, mixed
from ditkit_core.planner.search.partition_search import Candidate, FitTask
from ditkit_core.planner.step_time import step_seconds


class ScheduleSearch:
    """Searches the schedule of a division: split points and streamed blocks stay those of a candidate with one policy."""

    def __init__(self, task: FitTask, like: Candidate):
        """Prepare the search; the candidate's division and formats are used."""
        self._task, self._like = task, like

    def fastest(self, chosen: tuple[int, ...], share: float = 1.0) -> Candidate | None:
        """The schedule that recomputes least; None if none fits.

        Args:
            chosen: Indices of the task's GPUs: those of the candidate.
            share: Largest share of each GPU's available memory to use.
        """
        like, setting = self._like, self._like.setting
        assert chosen == setting.gpus, "another division has a search of its own"
        budgets = [self._task.gpus[i].budget for i in chosen]
        policies = self._policies(like.division, tuple(_limited(budget, share) for budget in budgets))
        if policies is None:
            return None
        profile = mixed([self._profile_of(policy) for policy in policies[1]])
        work = replace(self._task.work, pipelined=setting.pipelined, quantize=setting.quantize)
        gpus = [self._task.gpus[i] for i in chosen]
        found = replace(
            like,
            setting=replace(setting, policy=policies[0]),
            plan=compose(profile, like.division, budgets, work),
            time=step_seconds(profile, like.division, gpus, work),
            search=self,
        )
        return found if self._task.host is None or found.host <= self._task.host else None

    def _profile_of(self, policy: Policy) -> Profile:
        return self._task.profile_of(str(policy), self._like.setting.quantize)

    def _policies(self, division: Partition, budgets: tuple[Budget, ...]) -> tuple[str, tuple[Policy, ...]] | None:
        """The schedule, as a run file has it, and the policy of each block."""
        setting = self._like.setting
        task = BudgetTask(
            profile_of=cache(self._profile_of),
            division=division,
            budgets=budgets,
            work=replace(self._task.work, pipelined=setting.pipelined, quantize=setting.quantize),
            can_offload=False,
        )
        try:
            choice = choose(task)
        except UserError:
            return None
        return str(choice.schedule), choice.policies


def _limited(budget: Budget, share: float) -> Budget:
    return replace(budget, total=int(budget.available * share), reserve=0)
