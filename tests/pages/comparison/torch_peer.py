"""What torch's `GradScaler` does, measured by running it, on the CPU."""

import contextlib
import math

INF, NAN = float("inf"), float("nan")


class Torch:
    """The methods answer the rows of the page, in its words."""

    def run(self, gradients, scale=8.0, interval=2000, unscale=False):
        """The scaler, the optimizer, a parameter and the loss that was scaled."""
        import torch

        params = torch.nn.Parameter(torch.tensor(1.0))
        optimizer = torch.optim.SGD([params], lr=0.5, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        for gradient in gradients:
            optimizer.zero_grad()
            loss = scaler.scale(params * gradient)
            loss.backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return scaler, optimizer, params, loss

    def never_applies_a_non_finite_step(self):
        ends = [self.run([1.0, *[bad] * 200, 1.0])[2].item() for bad in (INF, NAN)]
        return "yes" if all(map(math.isfinite, ends)) else "no"

    def the_gradients_you_see_are_true(self):
        seen = [self.run([1.75], unscale=flag)[2].grad.item() for flag in (True, False)]
        # Without unscale_, `step` does it, and no one can clip before.
        return {(1.75, 1.75): "after unscale_"}[tuple(seen)]

    def the_reported_loss_is_true_on_an_overflow(self):
        return {32.0: "up to you", 4.0: "yes"}[self.run([4.0])[3].item()]

    def the_scale_stays_finite_and_above_0(self):
        scales = [
            self.run(gradients, **kwargs)[0].get_scale()
            for gradients, kwargs in (
                ([1.0] * 12, {"scale": 2.0**120, "interval": 1}),
                ([INF] * 300, {}),
            )
        ]
        assert scales[0] < INF
        return "yes" if all(0 < scale < INF for scale in scales) else "no"

    def tells_a_bad_loss_from_an_overflow(self):
        states = [self.run([1.0, bad])[0].state_dict() for bad in (NAN, INF)]
        return "no" if states[0] == states[1] else "yes"

    def counts_its_skips(self):
        run = self.run([1.0, INF, INF, 1.0, INF, INF, INF, 1.0])
        return "yes" if 5 in run[0].state_dict().values() else "no"

    def adamw_takes_16_bit_gradients(self):
        import torch

        taken = []
        for name in ("float16", "bfloat16"):
            params = torch.nn.Parameter(torch.ones(1, dtype=getattr(torch, name)))
            optimizer = torch.optim.AdamW([params], lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(params.sum()).backward()
            with contextlib.suppress(ValueError):  # it refuses them
                scaler.step(optimizer)
            if 0.8 < params.item() < 1:
                taken.append(name)
        return {("bfloat16",): "bfloat16 only"}[tuple(taken)]
