"""How other systems move their loss scale, in plain Python, in their own words.

One generator for each preset, with the flags first, then the arguments and defaults of
the system; it yields the loss scale after each step. A scale may become 0 or inf here.
"""

import ctypes

import numpy as np


def f32(x):
    return ctypes.c_float(x).value


def torch(
    flags,
    init_scale=65536.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
):
    scale, growth_tracker = f32(init_scale), 0
    for finite in flags:
        if not finite:
            scale, growth_tracker = f32(scale * backoff_factor), 0
        else:
            growth_tracker += 1
            if growth_tracker == growth_interval:
                larger = f32(scale * growth_factor)
                scale = larger if np.isfinite(larger) else scale
                growth_tracker = 0
        yield scale


def paddle(
    flags,
    init_loss_scaling=65536.0,
    incr_ratio=2.0,
    decr_ratio=0.5,
    incr_every_n_steps=2000,
    decr_every_n_nan_or_inf=1,
):
    scale, incr_count, decr_count = f32(init_loss_scaling), 0, 0
    for finite in flags:
        if not finite:
            incr_count, decr_count = 0, decr_count + 1
            if decr_count == decr_every_n_nan_or_inf:
                scale, decr_count = f32(scale * f32(decr_ratio)), 0
        else:
            incr_count, decr_count = incr_count + 1, 0
            if incr_count == incr_every_n_steps:
                scale, incr_count = f32(scale * f32(incr_ratio)), 0
        yield scale


def paddle_doc(
    flags,
    init_loss_scaling=32768.0,
    incr_ratio=2.0,
    decr_ratio=0.5,
    incr_every_n_steps=1000,
    decr_every_n_nan_or_inf=2,
):
    scale, consecutive, accumulated = f32(init_loss_scaling), 0, 0
    for finite in flags:
        if finite:
            consecutive += 1
        else:
            consecutive, accumulated = 0, accumulated + 1
        if consecutive == incr_every_n_steps:
            scale, consecutive = f32(scale * f32(incr_ratio)), 0
        if accumulated == decr_every_n_nan_or_inf:
            scale, accumulated = f32(scale * f32(decr_ratio)), 0
        yield scale


def mindspore(flags, scale_value, scale_factor, scale_window):
    scale, counter = f32(scale_value), 0
    for finite in flags:
        if finite:
            if counter == scale_window - 1:
                larger = f32(scale * scale_factor)
                scale = larger if np.isfinite(larger) else scale
            counter = (counter + 1) % scale_window
        else:
            scale, counter = max(f32(scale / scale_factor), 1.0), 0
        yield scale


def mindformers_windows(max_scale_window, min_scale_window):
    window, windows = max_scale_window, [max_scale_window]
    while window > min_scale_window:
        if window > 100:
            window = int(window / 2 / 100) * 100
        elif window == 100:
            window = 50
        else:
            window = window - min_scale_window / 2
        windows.insert(0, int(window))
    return windows


def mindformers_adaptive(
    flags,
    loss_scale_value,
    scale_factor,
    scale_window,
    max_scale_window=1000,
    min_scale_window=20,
):
    windows = mindformers_windows(max_scale_window, min_scale_window)
    index = windows.index(scale_window) if scale_window in windows else 0
    window, scale = windows[index], f32(loss_scale_value)
    cur_iter, last_iter, up, down = 1, 0, 0, 0
    for finite in flags:
        increase = cur_iter - last_iter >= window
        if not finite:
            scale = max(f32(scale * f32(1 / scale_factor)), 1.0)
        elif increase:
            scale = f32(scale * scale_factor)
            up, down = (up + 1) % 4, 0
        if increase or not finite:
            last_iter = cur_iter
        cur_iter += 1
        if up == 3 and index != len(windows) - 1:
            index, up = index + 1, 0
            window = windows[index]
        if not finite:
            down = (down + 1) % 4
            if down == 3 and index not in (-1, 0):
                window, index, up, down = 1, -1, 0, 0
        yield scale


def keras(flags, initial_scale=32768.0, dynamic_growth_steps=2000):
    dynamic_scale, step_counter = f32(initial_scale), 0
    for finite in flags:
        if not finite:
            dynamic_scale, step_counter = f32(dynamic_scale / 2), 0
        elif step_counter == dynamic_growth_steps - 1:
            dynamic_scale, step_counter = f32(dynamic_scale * 2), 0
        else:
            step_counter += 1
        yield dynamic_scale


def flax(
    flags,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    scale=65536.0,
    minimum_scale=None,
):
    minimum_scale = 2.0**-126 if minimum_scale is None else minimum_scale
    scale, fin_steps = f32(scale), 0
    for finite in flags:
        grows = finite and fin_steps == growth_interval
        if grows:
            largest = float(np.finfo(np.float32).max)
            scale = min(f32(scale * f32(growth_factor)), largest)
        elif not finite:
            scale = max(f32(scale * f32(backoff_factor)), minimum_scale)
        fin_steps = fin_steps + 1 if finite and not grows else 0
        yield scale


def deepspeed(
    flags,
    init_scale=65536.0,
    scale_factor=2.0,
    scale_window=1000,
    min_scale=1.0,
    delayed_shift=2,
    consecutive_hysteresis=False,
):
    scale, cur_hysteresis = init_scale, delayed_shift
    last_overflow_iter = -1
    for cur_iter, finite in enumerate(flags):
        if not finite:
            if delayed_shift == 1 or cur_hysteresis == 1:
                scale = max(scale / scale_factor, min_scale)
            else:
                cur_hysteresis -= 1
            last_overflow_iter = cur_iter
        else:
            if consecutive_hysteresis:
                cur_hysteresis = delayed_shift
            stable = cur_iter - last_overflow_iter - 1
            if stable > 0 and stable % scale_window == 0:
                cur_hysteresis = delayed_shift
                scale *= scale_factor
        yield scale


def megatron(
    flags,
    initial_scale=4294967296.0,
    min_scale=1.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
):
    scale, growth_tracker, hysteresis_tracker = f32(initial_scale), 0, hysteresis
    for finite in flags:
        if not finite:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(f32(scale * f32(backoff_factor)), f32(min_scale))
        else:
            growth_tracker += 1
            if growth_tracker == growth_interval:
                growth_tracker, hysteresis_tracker = 0, hysteresis
                scale = f32(scale * f32(growth_factor))
        yield scale


# Spikes: whether each pair of a loss and a norm is skipped.


def _mean_and_deviation(values, fewer):
    mean = sum(values) / len(values)
    squares = sum((x - mean) ** 2 for x in values)
    return mean, (squares / max(len(values) - fewer, 1)) ** 0.5


def levanter_spikes(signals, window, sigmas):
    for t, pair in enumerate(signals):
        skip = False
        for row in (0, 1):
            past = [one[row] for one in signals[max(0, t - window) : t]]
            if len(past) >= max(2, window // 2):
                mean, deviation = _mean_and_deviation(past, 0)
                skip |= pair[row] > mean + sigmas * max(deviation, 1e-6)
        yield skip


def maxtext_spikes(signals, window, sigmas):
    for t, pair in enumerate(signals):
        skip = False
        for row in (0, 1):
            past = [one[row] for one in signals[max(0, t - window) : t]]
            if t + 1 >= max(2, window // 2):
                mean, deviation = _mean_and_deviation(past, 1)
                skip |= pair[row] - mean > sigmas * deviation
        yield skip


olmo_spikes = maxtext_spikes


def spike_limit(signals, max_norm, max_loss):
    for loss, norm in signals:
        skip = max_norm is not None and norm > max_norm
        yield skip or (max_loss is not None and loss > max_loss)
