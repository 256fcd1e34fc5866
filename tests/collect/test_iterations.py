"""Several optimizers: an iteration of the training is one step, whatever steps in it."""

import gc

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    INF,
    NAN,
    SCOPES,
    Do,
    Net,
    batch,
    enable,
    infer,
    set_nan,
    sgd,
    train,
    verdicts,
)
from nanscan._collect.iterations import Iterations

# Which optimizers step, and the numbers of the steps that they belong to.
RUNS = {
    "one": ("AAAA", "0123"),
    "two by turns": ("ABABAB", "001122"),
    "three": ("ABCABCABC", "000111222"),
    "five steps of a critic to one": ("AAAAABAAAAABAAAAAB", "012344567899abcdee"),
    "two steps of the second": ("ABBABBABB", "001123345"),
    "every second time": ("ABAABAABA", "001223445"),
    "one joins late": ("AAABABAB", "01223344"),
    "one leaves": ("ABABAAA", "0011234"),
    "the order changes": ("ABABBABA", "00112233"),
}


@pytest.mark.parametrize("name", RUNS)
def test_which_steps_are_one(name):
    run, expected = RUNS[name]
    iterations, step, numbers = Iterations(), 0, []
    for optimizer in run:
        step += iterations.begin(ord(optimizer))
        numbers.append(step)
        step += iterations.end(ord(optimizer))
    assert numbers == [int(digit, 16) for digit in expected]


@pytest.mark.parametrize("name", ["one", "two by turns", "three", "five steps of a critic to one"])
def test_what_is_expected_holds_once_a_round_was_seen(name):
    """So the number is right before an optimizer steps, too."""
    run = RUNS[name][0]
    iterations, surprises = Iterations(), []
    for _ in range(5):
        surprises.append(0)
        for optimizer in run:
            surprises[-1] += iterations.begin(ord(optimizer)) != 0
            iterations.end(ord(optimizer))
    assert surprises[1:] == [0] * 4


def test_another_end_of_a_step_parts_what_comes_after_it():
    iterations = Iterations()
    assert iterations.begin(0) == 0
    assert iterations.end(0) == 1
    iterations.interrupt()
    assert iterations.begin(1) == 0
    assert iterations.end(1) == 1


def test_a_long_run_of_one_optimizer_is_not_remembered_step_by_step():
    iterations = Iterations()
    for _ in range(10_000):
        iterations.begin(0)
        assert iterations.end(0) == 1
    assert len(iterations._went_on) < 200


# -- training loops --------------------------------------------------------------------------------


class Gan(nn.Module):
    """Has no forward: a generator and a critic, each with its own optimizer."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = Net(), Net()
        self.optimizers = sgd(self.critic), sgd(self.generator)

    def critic_loss(self, noise, real):
        return self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()

    def generator_loss(self, noise):
        return -self.critic(self.generator(noise)).mean()

    def iterate(self, *, bad_real=False, bad_noise=False, critics=1):
        """One round: so many steps of the critic, and one of the generator."""
        theirs, ours = self.optimizers
        for number in range(critics):
            theirs.zero_grad()
            real = batch(1)
            self.critic_loss(
                batch(), set_nan(real) if bad_real and number == 1 else real
            ).backward()
            theirs.step()
        ours.zero_grad()
        noise = batch(2)
        self.generator_loss(set_nan(noise) if bad_noise else noise).backward()
        ours.step()


def faults(monitor):
    return {f.step for f in monitor.findings if f.is_fault}


@SCOPES
def test_a_gan(scope):
    model = Gan()
    monitor = enable(scope, model)
    for number in range(4):
        model.iterate()
        assert monitor.steps == number + 1
    assert monitor.findings == []
    history = monitor.history("critic.fc2 output")
    assert history["step"].tolist() == [0, 1, 2, 3]
    assert history["calls"].tolist() == [3] * 4  # of both parts
    assert monitor.history("critic.fc1.weight param")["calls"].tolist() == [1] * 4


@SCOPES
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("part", ["critic", "generator"])
def test_a_fault_in_a_part_of_an_iteration_has_its_number(scope, part, number):
    model = Gan()
    monitor = enable(scope, model, action="log", skip_step=True)
    for iteration in range(5):
        bad = iteration == number
        if part == "critic":
            theirs, _ = model.optimizers
            theirs.zero_grad()
            model.critic_loss(batch(), set_nan(batch(1)) if bad else batch(1)).backward()
            theirs.step()
            model.optimizers[1].zero_grad()
            model.generator_loss(batch(2)).backward()
            model.optimizers[1].step()
        else:
            model.iterate(bad_noise=bad)
        assert monitor.steps == iteration + 1
    assert faults(monitor) == {number}
    first = monitor.findings[0]
    name = {"critic": "critic", "generator": "generator"}[part]
    assert (str(first.site), first.verdict) == (f"{name} input[0]", "propagated")
    over = [f for f in monitor.findings if f.verdict == "recovered"]
    assert [f.step for f in over] == [number + 1]  # in the part in which it was bad


@SCOPES
def test_a_fault_in_each_step_of_a_generator_goes_on_in_the_steps_of_its_critic(scope):
    """The critic's part runs both models on good data: that ends nothing."""
    model = Gan()
    monitor = enable(scope, model, action="log", skip_step=True)
    for iteration in range(6):
        model.iterate(bad_noise=iteration > 1)
    told = [(f.step, f.news) for f in monitor.findings if f.news]
    assert told == [(2, "new")]
    assert not [f for f in monitor.findings if f.verdict == "recovered"]


@SCOPES
def test_several_steps_of_a_critic_to_one(scope):
    """Each is a step. That of the generator belongs to the last of them."""
    model = Gan()
    monitor = enable(scope, model, action="log", skip_step=True)
    for number in range(3):
        model.iterate(critics=5)
        assert monitor.steps == 5 * (number + 1)
    model.iterate(critics=5, bad_real=True)
    assert faults(monitor) == {16}
    model.iterate(critics=5, bad_noise=True)
    assert faults(monitor) == {16, 24}


@SCOPES
def test_actor_critic_with_three_optimizers(scope):
    """One forward and three losses."""

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic, self.alpha = Net(), Net(), nn.Linear(1, 1)

    model = Agent()
    monitor = enable(scope, model, action="log", skip_step=True)
    optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in model.children()]
    for number in range(5):
        observed = batch(number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = model.critic(observed if number != 3 else set_nan(observed)).square().mean()
        entropy = model.actor(observed).square().mean()
        alpha = model.alpha(torch.ones(1, 1)).sum()
        for loss, optimizer in zip((entropy, value, alpha), optimizers, strict=True):
            loss.backward()
            optimizer.step()
        assert monitor.steps == number + 1
    assert faults(monitor) == {3}
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("critic input[0]", "propagated")
    assert {f.episode for f in monitor.findings if f.is_fault} == {1}
    assert [f.step for f in monitor.findings if f.verdict == "recovered"] == [4]


def both(model):
    """As Muon for matrices and AdamW for the rest: they step one after the other."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.SGD(matrices, 0.01, momentum=0.9), torch.optim.AdamW(rest, 1e-3)


def run_both(model, optimizers, xs, scale=1.0):
    for optimizer in optimizers:
        optimizer.zero_grad()
    for x in xs:
        (model(x).square().mean() * scale).backward()
    for optimizer in optimizers:
        optimizer.step()


@SCOPES
def test_two_optimizers_that_step_back_to_back(scope):
    model = Net()
    monitor = enable(scope, model, action="log", skip_step=True)
    optimizers = both(model)
    for number in range(5):
        run_both(model, optimizers, [set_nan(batch()) if number == 2 else batch()])
        assert monitor.steps == number + 1
    assert faults(monitor) == {2}
    assert verdicts(monitor)[0] == (2, "Net input[0]", "propagated")
    # The gradients of the second one follow from the forward before the first one's step.
    assert {f.verdict for f in monitor.findings if f.is_fault} == {"propagated"}
    assert "fc1.bias grad" in {str(f.site) for f in monitor.findings}
    assert [f.step for f in monitor.findings if f.verdict == "recovered"] == [3]
    assert monitor.history("fc2.bias grad")["step"].tolist() == [0, 1, 2, 3, 4]
    assert monitor.healthy


@SCOPES
def test_what_only_the_second_one_sees_is_over_in_its_part(scope):
    model = Net()
    monitor = enable(scope, model, action="log", skip_step=True)
    optimizers = both(model)
    bad = {}
    model.fc2.bias.register_hook(lambda grad: grad * bad.get("scale", 1.0))
    for number in range(8):
        bad["scale"] = NAN if number in (2, 5) else 1.0
        run_both(model, optimizers, [batch()])
    found = [(f.step, str(f.site), f.verdict) for f in monitor.findings]
    assert found == [
        (2, "fc2.bias grad", "origin"),
        (3, "fc2.bias grad", "recovered"),
        (5, "fc2.bias grad", "origin"),
        (6, "fc2.bias grad", "recovered"),
    ]


@SCOPES
def test_accumulation_with_two_optimizers(scope):
    model = Net()
    monitor = enable(scope, model, action="log", skip_step=True)
    optimizers = both(model)
    for number in range(3):
        xs = [batch(i) for i in range(4)]
        if number == 1:
            xs[2] = set_nan(xs[2])
        run_both(model, optimizers, xs)
        assert monitor.steps == number + 1
    assert faults(monitor) == {1}
    assert monitor.history("fc2 output")["calls"].tolist() == [4] * 3


@SCOPES
def test_a_grad_scaler_that_skips_one_of_them(scope):
    """That counts as its step."""
    model = Net()
    monitor = enable(scope, model, action="log")
    optimizers = both(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    overflows = {}
    model.fc2.bias.register_hook(lambda grad: grad * overflows.get("scale", 1.0))
    for number in range(5):
        overflows["scale"] = INF if number == 2 else 1.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert monitor.steps == number + 1
    assert verdicts(monitor) == [(2, "fc2.bias grad", "scale-search")]
    assert monitor.healthy


@SCOPES
def test_one_optimizer_that_steps_in_two_calls_of_a_scaler(scope):
    model = Net()
    monitor = enable(scope, model, action="log")
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, x in enumerate([batch(), batch() * 1e38, batch()]):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert monitor.steps == number + 1


@SCOPES
def test_an_optimizer_of_other_parameters_does_not_count(scope):
    model, other = Net(), nn.Parameter(torch.ones(2))
    monitor = enable(scope, model)
    ours, theirs = sgd(model), torch.optim.SGD([other], 0.1)
    for _ in range(3):
        train(model, ours, [batch()])
        other.grad = torch.ones(2)
        theirs.step()
        if scope == "model":
            theirs.step()
    assert monitor.steps == 3


# -- which optimizer is which ----------------------------------------------------------------------


@SCOPES
@pytest.mark.parametrize("held", ["no more", "in a cycle", "by all"])
def test_an_optimizer_that_is_made_anew_each_step(scope, held):
    model, all_of_them = Net(), []
    monitor = enable(scope, model)
    for number in range(8):
        optimizer = sgd(model)
        if held == "in a cycle":
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        elif held == "by all":
            all_of_them.append(optimizer)
        train(model, optimizer, [batch()])
        assert monitor.steps == number + 1
    del optimizer


@SCOPES
def test_an_optimizer_that_gets_more_parameters(scope):
    model = Net()
    monitor = enable(scope, model)
    optimizer = torch.optim.SGD(model.fc2.parameters(), 0.01)
    train(model, optimizer, [batch()] * 2)
    optimizer.add_param_group({"params": model.fc1.parameters()})
    train(model, optimizer, [batch()] * 2)
    assert monitor.steps == 4
    optimizer = sgd(model)  # in the place of the first, with others
    train(model, optimizer, [batch()] * 2)
    assert monitor.steps == 6


def test_an_optimizer_that_replaces_one_of_other_parameters_that_is_still_alive():
    """As one of adapters, while what trained the model before is kept."""
    model = Net()
    monitor = nanscan.enable(model)
    first = torch.optim.SGD(model.fc1.parameters(), 0.01)
    train(model, first, [batch()] * 3)
    second = torch.optim.SGD(model.fc2.parameters(), 0.01)
    assert monitor.steps == 3
    train(model, second, [batch()] * 3)
    assert monitor.steps == 6
    assert monitor.history("fc1 output")["step"].tolist() == [0, 1, 2, 3, 4, 5]


def test_one_model_after_the_other():
    """A search for hyperparameters: each has its own optimizer."""
    monitor = nanscan.enable()
    for number in range(5):
        model = Net()
        train(model, sgd(model), [batch()] * 3)
        gc.collect()
        assert monitor.steps == 3 * (number + 1)


def test_optimizers_that_share_parameters():
    """As an encoder that a critic's optimizer and one of its own train."""
    model = Net()
    monitor = nanscan.enable(model)
    whole, part = sgd(model), torch.optim.SGD(model.fc1.parameters(), 0.01)
    for number in range(4):
        model(batch()).sum().backward()
        whole.step()
        part.step()
        assert monitor.steps == number + 1


def test_an_optimizer_for_each_parameter():
    """They step in the backward, each as soon as its gradient is there."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)])
    monitor = nanscan.enable(model)
    for parameter in model.parameters():
        optimizer = sgd_of(parameter)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for number in range(4):
        model(torch.ones(1, 2)).sum().backward()
        assert monitor.steps == number + 1
    assert monitor.history("0 output")["step"].tolist() == [0, 1, 2, 3]


def sgd_of(parameter):
    return torch.optim.SGD([parameter], 0.01)


def test_plans_of_optimizers_that_are_gone_are_forgotten():
    monitor = nanscan.enable()
    for _ in range(20):
        model = Net()
        train(model, sgd(model), [batch()])
    gc.collect()
    train(model, sgd(model), [batch()])
    assert len(monitor._collector.optimizers._plans) <= 2


# -- what else goes by the number of the step ------------------------------------------------------


@SCOPES
def test_a_step_is_scanned_in_all_its_parts_or_in_none(scope):
    """Once it is known that it has several: in the first one the generator comes as a surprise."""
    model = Gan()
    monitor = enable(scope, model, every_n_steps=2)
    for _ in range(7):
        model.iterate()
    assert monitor.history("critic.fc1 output")["step"].tolist() == [0, 2, 4, 6]
    assert monitor.history("critic.fc1 output")["calls"].tolist() == [2, 3, 3, 3]
    assert monitor.history("generator.fc1.weight param")["step"].tolist() == [2, 4, 6]


def test_sinks_hear_of_each_step_once():
    steps = []

    class Steps(nanscan.Sink):
        def on_step(self, step):
            steps.append(step)

    model = Gan()
    nanscan.enable(model, action=Steps())
    for _ in range(4):
        model.iterate()
    assert steps == [0, 1, 2, 3]


def test_a_bad_iteration_is_saved_by_its_number(tmp_path):
    model = Gan()
    nanscan.enable(model, action="log", save_dir=tmp_path, skip_step=True)
    for iteration in range(3):
        model.iterate(bad_noise=iteration == 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1-rank-0"]
    saved = nanscan.load_saved(tmp_path / "step-1-rank-0")
    assert saved.step == 1
    assert saved.args[0].isnan().any()


@SCOPES
def test_the_op_is_located_in_an_iteration_after_the_finding(scope):
    model = Gan()
    model.critic.act = Do(lambda x: x / (x - x) if model.is_bad else x.tanh())
    model.is_bad = False
    monitor = enable(scope, model, action="log", locate=True, skip_step=True)
    for iteration in range(6):
        model.is_bad = iteration >= 2
        model.iterate()
    (located,) = monitor.located
    assert located.finding.step == 2
    assert located.location.step == 2  # the generator's part of the same iteration
    assert located.location.op.startswith("aten.div")


@SCOPES
def test_a_fault_told_amid_an_iteration_has_its_number(scope):
    """`findings` knows what the step at hand has shown so far."""
    model = Gan()
    monitor = enable(scope, model, action="log")
    for _ in range(2):
        model.iterate()
    model.critic_loss(batch(), batch()).backward()
    model.optimizers[0].step()
    with torch.enable_grad():
        model.generator_loss(set_nan(batch()))
    assert faults(monitor) == {2}


@SCOPES
def test_raising_in_the_second_part(scope):
    model = Gan()
    monitor = enable(scope, model, action="raise")
    for _ in range(2):
        model.iterate()
    with pytest.raises(nanscan.NonFiniteError) as error:
        model.iterate(bad_noise=True)
    assert error.value.finding.step == 2
    assert monitor.steps == 3


@SCOPES
def test_validation_between_iterations(scope):
    model = Gan()
    monitor = enable(scope, model, action="log")
    for number in range(3):
        model.iterate()
        infer(model.generator, batch())
        assert monitor.steps == number + 1
    infer(model.generator, set_nan(batch()))
    assert faults(monitor) == {3}


@SCOPES
def test_the_user_counts(scope):
    model = Gan()
    monitor = enable(scope, model)
    for _ in range(3):
        model.iterate()
    monitor.step()
    for number in range(3):
        model.iterate()
        monitor.step()
        assert monitor.steps == 5 + number
