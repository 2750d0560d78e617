"""The driver: one RL run, read from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rljob_api.contract import ResolvedJob, TrainerPhase
from rljob_api.resolve import count_drawn_prompts
from rljob_api.v1alpha1.algorithm import AdvantageEstimator, KLControllerType, KLPlacement
from rljob_trainer.algorithms.kl import update_kl_coefficient
from rljob_trainer.checkpoint import files
from rljob_trainer.checkpoint.base_model import fingerprint_model
from rljob_trainer.config import build_loss_settings
from rljob_trainer.critic import uses_critic
from rljob_trainer.data import PromptRow
from rljob_trainer.dispatch import Dispatcher
from rljob_trainer.distributed.cluster import start_cluster
from rljob_trainer.distributed.ray_connection import connect_ray
from rljob_trainer.dynamic_sampling import CollectedBatch, collect_batch
from rljob_trainer.engines.contract import SamplingParams
from rljob_trainer.errors import StopRequested
from rljob_trainer.evaluation import evaluate_sets
from rljob_trainer.experience import summarise
from rljob_trainer.experience_maker import Experience, ExperienceMaker
from rljob_trainer.inputs import load_inputs
from rljob_trainer.reporting import RunReporter, StepReport
from rljob_trainer.resume import ResumePoint, check_adapters, choose_resume_point, describe_start
from rljob_trainer.rewards import RewardService
from rljob_trainer.rollout import RolloutPlan, RolloutRunner, ScoredSample
from rljob_trainer.rows import UpdateMetrics
from rljob_trainer.run_state import RunState
from rljob_trainer.saving import CheckpointSaver
from rljob_trainer.step_updates import Updater
from rljob_trainer.stopping import StopSignal
from rljob_trainer.warm_start import run_warm_start


class Trainer:
    """Trains `job` to its last step, or until a stop is asked for."""

    def __init__(self, job: ResolvedJob, reporter: RunReporter, stop: StopSignal) -> None:
        self._job, self._spec, self._algorithm = job, job.spec, job.spec.algorithm
        self._reporter, self._stop = reporter, stop
        self._directory = Path(job.paths.run_directory)
        self._state = RunState(kl_coefficient=job.spec.algorithm.kl.coefficient)
        self._saved_step: int | None = None
        self._uses_reference = self._algorithm.kl.placement is not KLPlacement.NONE
        self._uses_critic = uses_critic(self._algorithm)

    def run(self) -> None:
        """The whole run.

        Raises:
            StopRequested: after the checkpoint that a stop asked for. TrainerError: everything that failed.
        """
        with self._reporter.phase(TrainerPhase.SETUP):
            resume = self._set_up()
        try:
            self._train(resume)
        except StopRequested:
            self._save()
            self._saver.wait()
            raise
        except Exception:
            self._saver.settle()
            raise
        finally:
            self._rewards.close()
            self._cluster.stop()

    def _set_up(self) -> ResumePoint | None:
        """What is cheap and may fail comes first: data and checkpoints are checked before a process is started."""
        job, spec = self._job, self._spec
        self._inputs = load_inputs(job, self._reporter.note)
        self._sampler = self._inputs.sampler
        self._total_steps = self._inputs.total_steps
        files.claim_run_directory(
            self._directory, uid=job.uid, name=job.name, namespace=job.namespace, adopt=spec.checkpoint.adopt
        )
        resume = choose_resume_point(job, self._reporter.note, self._reporter.heartbeat)
        if spec.model.lora is not None:
            self._state.base_model = fingerprint_model(spec.model.source, spec.model.revision)
            check_adapters(job, resume, self._state.base_model)
        connect_ray(job)
        self._stop.install_signal_handlers()
        self._rewards = RewardService(spec.reward, layout=job.layout)
        self._rewards.dry_run(self._inputs.train.rows)
        self._cluster = start_cluster(
            job, build_loss_settings(job), self._inputs.stop_token_ids, self._stop.raise_if_requested
        )
        self._dispatcher = Dispatcher(job, self._cluster, self._reporter.heartbeat)
        self._maker = ExperienceMaker(job, self._dispatcher)
        self._updater = Updater(
            job, self._dispatcher, self._maker, total_steps=self._total_steps, note=self._reporter.note
        )
        self._saver = CheckpointSaver(
            job,
            self._cluster,
            heartbeat=self._reporter.heartbeat,
            note=self._reporter.note,
            on_published=self._reporter.report_checkpoint,
        )
        self._runner = RolloutRunner(self._cluster, self._rewards, self._inputs.tokenizer)
        return resume

    def _train(self, resume: ResumePoint | None) -> None:
        self._restore_or_warm_start(resume)
        is_resumed = resume is not None and resume.is_own
        self._state.sampler = self._sampler.state_dict()
        self._reporter.start_training(
            step=self._state.step,
            total_steps=self._total_steps,
            resumed_from=resume.checkpoint if resume is not None and is_resumed else None,
            num_parameters=self._cluster.num_parameters,
            note=describe_start(resume),
        )
        self._sync_weights()
        evaluation, checkpoint = self._spec.evaluation, self._spec.checkpoint
        if evaluation.before_training and not is_resumed:
            self._evaluate()
        for step in range(self._state.step + 1, self._total_steps + 1):
            self._train_step(step)
            self._saver.collect()
            is_last = step == self._total_steps
            if evaluation.every_steps and (is_last or step % evaluation.every_steps == 0):
                self._evaluate()
            if is_last or (checkpoint.every_steps and step % checkpoint.every_steps == 0):
                self._save()
            if checkpoint.export_every_steps and step % checkpoint.export_every_steps == 0:
                self._export()
            self._reporter.finish_step()
            if not is_last:
                self._stop.raise_if_requested()
        if checkpoint.export_at_end:
            self._export()
        with self._reporter.phase(TrainerPhase.CHECKPOINT):
            self._saver.wait()

    def _train_step(self, step: int) -> None:
        """Rollout with rewards, passes that the algorithm needs, advantages, updates, weight sync."""
        started = time.monotonic()
        batch, greedy = self._collect(step)
        with self._reporter.phase(TrainerPhase.TRAIN):
            self._dispatcher.make_room()
            experience = self._maker.make(
                batch.samples,
                kl_coefficient=self._state.kl_coefficient,
                greedy_rewards={sample.row.uid: sample.reward for sample in greedy} if greedy else None,
            )
            updates = self._updater.run(experience.rows, step, self._state)
        statistics = summarise(batch.all_samples)
        kl_coefficient = self._state.kl_coefficient
        self._state.kl_coefficient = self._adapt_kl_coefficient(experience)
        self._state.step = step
        self._state.sampler = self._sampler.state_dict()
        self._state.num_tokens_total += statistics.num_prompt_tokens + statistics.num_response_tokens
        if not self._stop.is_requested:
            self._sync_weights()
        self._reporter.report_step(
            StepReport(
                step=step,
                epoch=self._sampler.epoch,
                statistics=statistics,
                updates=updates.policy,
                learning_rate=updates.learning_rate,
                seconds=time.monotonic() - started,
                weight_version=step + 1,
                num_nan_steps=self._state.num_nan_steps,
                num_tokens_total=self._state.num_tokens_total,
                batch=batch,
                shaping=experience.shaping,
                kl_coefficient=kl_coefficient,
                critic=updates.critic,
                greedy_samples=greedy or None,
            )
        )

    def _collect(self, step: int) -> tuple[CollectedBatch, list[ScoredSample]]:
        """Scored groups to train on, by DAPO in several rounds; with ReMax also a greedy sample of each prompt."""
        rollout, greedy = self._spec.rollout, list[ScoredSample]()
        num_prompts = self._spec.training.prompts_per_step

        def draw(num_prompts: int) -> list[PromptRow]:
            return [self._inputs.train.rows[index] for index in self._sampler.take(num_prompts)]

        def roll_out(rows: list[PromptRow]) -> list[ScoredSample]:
            plan = self._plan_rollout(rows, rollout.samples_per_prompt, rollout.temperature, step)
            plans = [replace(plan, num_groups=min(num_prompts, len(rows)))]
            if self._algorithm.advantage_estimator is AdvantageEstimator.REMAX:
                plans.append(self._plan_rollout(rows, 1, 0.0, step, label="greedy"))
            samples, *baselines = self._roll_out(plans, TrainerPhase.ROLLOUT)
            for baseline in baselines:
                greedy.extend(baseline)
            return samples

        return collect_batch(
            num_prompts,
            self._algorithm.dynamic_sampling,
            draw=draw,
            roll_out=roll_out,
            num_drawn=count_drawn_prompts(self._spec),
        ), greedy

    def _adapt_kl_coefficient(self, experience: Experience) -> float:
        """The coefficient of the next step."""
        kl = self._algorithm.kl
        if experience.shaping.kl_mean is None:
            return self._state.kl_coefficient
        return update_kl_coefficient(
            self._state.kl_coefficient,
            kl.controller.type,
            measured_kl=experience.shaping.kl_mean,
            target=kl.controller.target,
            horizon_samples=kl.controller.horizon_samples,
            num_samples=len(experience.rows),
        )

    def _plan_rollout(
        self, rows: Sequence[PromptRow], num_samples: int, temperature: float, step: int, label: str = ""
    ) -> RolloutPlan:
        rollout = self._spec.rollout
        return RolloutPlan(
            rows=rows,
            num_samples=num_samples,
            params=SamplingParams(rollout.max_response_tokens, temperature, rollout.top_p if temperature else 1.0),
            seed=self._spec.training.seed,
            step=step,
            timeout_seconds=rollout.timeout_seconds,
            label=label,
        )

    def _roll_out(self, plans: Sequence[RolloutPlan], phase: TrainerPhase) -> list[list[ScoredSample]]:
        """Scored samples of each plan; the rewards of one are computed while the next generates."""
        poll = self._poll
        with self._reporter.phase(phase):
            groups = [self._runner.generate(plan, on_samples=self._reporter.count_samples, poll=poll) for plan in plans]
        with self._reporter.phase(TrainerPhase.REWARD if phase is TrainerPhase.ROLLOUT else phase):
            return [
                self._runner.collect(plan, groups_of_plan, poll=poll)
                for plan, groups_of_plan in zip(plans, groups, strict=True)
            ]

    def _poll(self) -> None:
        """While waiting: a stop ends the wait, a save that is complete is published at once."""
        self._stop.raise_if_requested()
        self._saver.collect()

    def _sync_weights(self) -> None:
        """The version after step s is s + 1, in every attempt."""
        with self._reporter.phase(TrainerPhase.SYNC):
            self._dispatcher.sync_weights(self._state.step + 1)

    def _evaluate(self) -> None:
        if not self._inputs.validation:
            return
        evaluation, sets = self._spec.evaluation, self._inputs.validation
        rows = [row for validation in sets for row in validation.rows]
        plan = self._plan_rollout(rows, evaluation.samples_per_prompt, evaluation.temperature, self._state.step)
        (samples,) = self._roll_out([plan], TrainerPhase.EVALUATE)
        metrics = evaluate_sets(sets, samples, pass_reward=evaluation.pass_reward)
        self._reporter.report_evaluation(self._state.step, summarise(samples), samples, metrics)

    def _restore_or_warm_start(self, resume: ResumePoint | None) -> None:
        if resume is not None:
            if self._uses_reference:
                self._dispatcher.setup_reference()
            if self._uses_critic:
                self._dispatcher.setup_critic()
            self._dispatcher.load(resume.checkpoint.path)
            if resume.is_own:
                self._state = RunState(**files.read_trainer_state(resume.checkpoint))
                if self._algorithm.kl.controller.type is KLControllerType.FIXED:
                    self._state.kl_coefficient = self._algorithm.kl.coefficient  # it may have been changed since
                self._sampler.load_state_dict(self._state.sampler)
                self._saved_step = self._state.step
            self._state.is_warm_started = True
            return
        if self._spec.warm_start is not None:
            with self._reporter.phase(TrainerPhase.WARM_START):
                supervised = self._spec.warm_start.supervised
                run_warm_start(
                    self._dispatcher,
                    self._inputs.demonstrations,
                    supervised,
                    self._spec.training.seed,
                    on_step=self._after_warm_start_step,
                )
        self._state.is_warm_started = True
        if self._uses_reference:
            self._dispatcher.setup_reference()
        if self._uses_critic:
            self._dispatcher.setup_critic()

    def _after_warm_start_step(self, step: int, metrics: UpdateMetrics) -> None:
        assert self._spec.warm_start is not None
        self._reporter.report_warm_start(step, self._spec.warm_start.supervised.steps, metrics)
        self._stop.raise_if_requested()

    def _save(self) -> None:
        """Begin to write the state after the last finished step, unless that was done already."""
        if self._saved_step == self._state.step or not self._state.is_warm_started:
            return  # half a warm start is not worth resuming from: it is repeated
        with self._reporter.phase(TrainerPhase.CHECKPOINT):
            self._saver.start(self._state.step, asdict(self._state))
        self._saved_step = self._state.step

    def _export(self) -> None:
        target = self._directory / "export" / f"step-{self._state.step}"
        if target.exists():
            return  # a resumed run that had finished
        with self._reporter.phase(TrainerPhase.EXPORT):
            self._dispatcher.export(target)
        self._reporter.note(f"exported to {target}")
