"""Naive float64 numpy versions of the layers, written from the formulas."""

import numpy as np


def f64(variable):
    return np.asarray(variable, np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, eps, weight=1.0):
    return weight * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)


def rope(x, positions, inv_freq, sign=1):
    """x [T, ..., D]; rotates the last 2 * len(inv_freq) channels, pair by pair."""
    x = x.copy()
    start = x.shape[-1] - 2 * len(inv_freq)
    for t, position in enumerate(positions):
        for i, frequency in enumerate(inv_freq):
            angle = sign * float(np.float32(position) * np.float32(frequency))
            a = x[t, ..., start + 2 * i].copy()
            b = x[t, ..., start + 2 * i + 1].copy()
            x[t, ..., start + 2 * i] = a * np.cos(angle) - b * np.sin(angle)
            x[t, ..., start + 2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
    return x


def expert(x, gate_weight, up_weight, down_weight, limit):
    gate = gate_weight @ x
    up = up_weight @ x
    gate = np.minimum(gate, limit)
    up = np.clip(up, -limit, limit)
    return down_weight @ (gate * sigmoid(gate) * up)
