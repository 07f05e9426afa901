"""Which sequences compute how many tokens next: a state machine without clock, tensors or I/O."""

from topg.scheduling.scheduler import Chunk, Scheduler, SchedulerLimits, StepPlan

__all__ = ["Chunk", "Scheduler", "SchedulerLimits", "StepPlan"]
