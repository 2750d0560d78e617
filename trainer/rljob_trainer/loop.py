"""The driver: one RL run, read from top to bottom."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rljob_api.contract import ResolvedJob, TrainerPhase
from rljob_api.presets import compute_max_staleness_steps
from rljob_api.v1alpha1.algorithm import KLControllerType, KLPlacement
from rljob_trainer.algorithms.kl import update_kl_coefficient
from rljob_trainer.checkpoint import files
from rljob_trainer.checkpoint.base_model import fingerprint_model
from rljob_trainer.config import build_loss_settings
from rljob_trainer.critic import uses_critic
from rljob_trainer.dispatch import Dispatcher
from rljob_trainer.distributed.cluster import start_cluster
from rljob_trainer.distributed.ray_connection import connect_ray
from rljob_trainer.distributed.waiting import Actor
from rljob_trainer.errors import StopRequested
from rljob_trainer.evaluation import evaluate_sets
from rljob_trainer.experience import summarise
from rljob_trainer.experience_maker import Experience, ExperienceMaker
from rljob_trainer.inputs import load_inputs
from rljob_trainer.reporting import RunReporter, StepReport
from rljob_trainer.resume import ResumePoint, check_adapters, choose_resume_point, describe_start
from rljob_trainer.rewards import RewardService
from rljob_trainer.rollout import RolloutRunner
from rljob_trainer.rollout_ahead import RolloutAhead
from rljob_trainer.rows import UpdateMetrics
from rljob_trainer.run_state import RunState
from rljob_trainer.saving import CheckpointSaver
from rljob_trainer.step_rollout import RolloutCollector, StepRollout, check_staleness
from rljob_trainer.step_updates import Updater
from rljob_trainer.stopping import StopSignal
from rljob_trainer.telemetry.writers import has_evaluation
from rljob_trainer.warm_start import run_warm_start


class Trainer:
    """Trains `job` to its last step, or until a stop is asked for."""

    def __init__(self, job: ResolvedJob, reporter: RunReporter, stop: StopSignal) -> None:
        self._job, self._spec, self._algorithm = job, job.spec, job.spec.algorithm
        self._reporter, self._stop = reporter, stop
        self._directory = Path(job.paths.run_directory)
        self._state = RunState(kl_coefficient=job.spec.algorithm.kl.coefficient)
        self._saved_step: int | None = None
        self._synced_version: int | None = None
        """Version of the weights that the engines hold."""
        self._evaluated_step: int | None = None
        self._max_staleness_steps = compute_max_staleness_steps(job.spec.rollout)
        self._runs_ahead = self._max_staleness_steps > 0
        self._uses_reference = self._algorithm.kl.placement is not KLPlacement.NONE
        self._uses_critic = uses_critic(self._algorithm)
        self.actors: list[Actor] = []
        """Ranks and engines, once they are there; for whoever watches the run."""

    def run(self) -> None:
        """The whole run.

        Raises:
            StopRequested: after the checkpoint that a stop asked for. TrainerError: everything that failed.
        """
        with self._reporter.phase(TrainerPhase.SETUP):
            resume = self._set_up()
        try:
            with self._ahead:
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
        self.actors = self._cluster.actors
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
        runner = RolloutRunner(self._cluster, self._rewards, self._inputs.tokenizer)
        self._collector = RolloutCollector(job, self._inputs, runner, on_samples=self._reporter.count_samples)
        self._ahead = RolloutAhead(
            # Phases are the driver's: what runs beside it is in none.
            lambda step, poll: self._collector.collect(step, phase=lambda _: nullcontext(), poll=poll),
            poll=self._stop.raise_if_requested,
            note=self._reporter.note,
        )
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
        checkpoint = self._spec.checkpoint
        # Before training; or what a stop cut short after the step that a resumed run starts from.
        self._evaluate_if_due()
        self._export_if_due()
        for step in range(self._state.step + 1, self._total_steps + 1):
            self._train_step(step)
            self._saver.collect()
            is_last = step == self._total_steps
            self._evaluate_if_due()
            if is_last or (checkpoint.every_steps and step % checkpoint.every_steps == 0):
                self._save()
            self._export_if_due()
            self._reporter.finish_step()
            if not is_last:
                self._stop.raise_if_requested()
                self._ahead.raise_if_failed()
        if checkpoint.export_at_end:
            self._export()
        with self._reporter.phase(TrainerPhase.CHECKPOINT):
            self._saver.wait()

    def _train_step(self, step: int) -> None:
        """Rollout with rewards, passes that the algorithm needs, advantages, updates, weight sync."""
        started = time.monotonic()
        rollout = self._take_rollout(step)
        batch, greedy = rollout.batch, rollout.greedy
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
        self._state.sampler = rollout.sampler  # not the sampler's own: a rollout that runs ahead has drawn more
        self._state.num_tokens_total += statistics.num_prompt_tokens + statistics.num_response_tokens
        if not self._runs_ahead and not self._stop.is_requested:
            self._sync_weights()
        self._reporter.report_step(
            StepReport(
                step=step,
                epoch=rollout.epoch,
                statistics=statistics,
                updates=updates.policy,
                learning_rate=updates.learning_rate,
                seconds=time.monotonic() - started,
                weight_version=self._synced_version if self._runs_ahead else step + 1,
                num_nan_steps=self._state.num_nan_steps,
                num_tokens_total=self._state.num_tokens_total,
                batch=batch,
                shaping=experience.shaping,
                kl_coefficient=kl_coefficient,
                critic=updates.critic,
                greedy_samples=greedy or None,
                rollout_ahead_seconds=rollout.seconds if self._runs_ahead else None,
            )
        )

    def _take_rollout(self, step: int) -> StepRollout:
        """The samples of `step`. With engines that run ahead these were generated while the step before trained; the
        engines then get the weights as they are now, and go on with the next step."""
        if self._runs_ahead:
            with self._reporter.phase(TrainerPhase.ROLLOUT):
                rollout = self._ahead.take(step, self._poll)
        else:
            rollout = self._collector.collect(step, phase=self._reporter.phase, poll=self._poll)
        check_staleness([*rollout.batch.samples, *rollout.greedy], step, self._max_staleness_steps)
        if self._runs_ahead and step < self._total_steps:
            self._sync_weights()
            self._ahead.start(step + 1)
        return rollout

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

    def _poll(self) -> None:
        """While waiting: a stop ends the wait, a save that is complete is published at once."""
        self._stop.raise_if_requested()
        self._saver.collect()

    def _sync_weights(self) -> None:
        """The version after step s is s + 1, in every attempt. Engines that hold it already are left alone."""
        version = self._state.step + 1
        if self._synced_version == version:
            return
        with self._reporter.phase(TrainerPhase.SYNC):
            self._dispatcher.sync_weights(version)
        self._synced_version = version

    def _evaluate_if_due(self) -> None:
        """After the last finished step, unless that was done already."""
        step, evaluation = self._state.step, self._spec.evaluation
        if step == 0:
            is_due = evaluation.before_training
        else:
            is_due = evaluation.every_steps > 0 and (step == self._total_steps or step % evaluation.every_steps == 0)
        if is_due and self._inputs.validation and self._evaluated_step != step:
            self._evaluate()
            self._evaluated_step = step

    def _evaluate(self) -> None:
        if self._runs_ahead:
            # The next step's samples are kept; the engines then hold newer weights than those are of.
            with self._reporter.phase(TrainerPhase.ROLLOUT):
                self._ahead.settle(self._poll)
            self._sync_weights()
        samples = self._collector.evaluate(self._state.step, phase=self._reporter.phase, poll=self._poll)
        metrics = evaluate_sets(self._inputs.validation, samples, pass_reward=self._spec.evaluation.pass_reward)
        self._reporter.report_evaluation(self._state.step, summarise(samples), samples, metrics)

    def _restore_or_warm_start(self, resume: ResumePoint | None) -> None:
        # Engines have loaded their model and cache by now. The first sync brings them back.
        self._dispatcher.make_room()
        self._prepare_state(resume)
        self._dispatcher.allocate_moments()

    def _prepare_state(self, resume: ResumePoint | None) -> None:
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
                if has_evaluation(self._directory, self._state.step):
                    self._evaluated_step = self._state.step
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
                    max_nan_steps=self._spec.training.max_nan_steps,
                    note=self._reporter.note,
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

    def _export_if_due(self) -> None:
        every_steps = self._spec.checkpoint.export_every_steps
        if every_steps and self._state.step and self._state.step % every_steps == 0:
            self._export()

    def _export(self) -> None:
        target = self._directory / "export" / f"step-{self._state.step}"
        if target.exists():
            return  # a resumed run that had finished
        with self._reporter.phase(TrainerPhase.EXPORT):
            self._dispatcher.export(target)
        self._reporter.note(f"exported to {target}")
