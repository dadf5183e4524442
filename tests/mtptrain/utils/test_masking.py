"""Tests that what must not be shown is hidden, and nothing else."""

import json

import pytest

from mtptrain.utils.masking import hide_home, hide_passwords, hide_secrets


def test_secrets_and_homes_are_hidden_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hide_passwords(["x=http://me:a@b:c@h/v1", {"p": "hf://a/b@c"}]) == ["x=http://***@h/v1", {"p": "hf://a/b@c"}]
    assert hide_secrets("the key is abcdefgh, abcdef", ["abcdef", "abcdefgh", "a"]) == "the key is ***, ***"
    shown = "a 'http://h/v1?key=***&***' http://h?***#d ?e=f"
    assert hide_passwords("a 'http://h/v1?key=1&b' http://h?c#d ?e=f") == shown
    monkeypatch.setenv("HOME", "/root")
    assert hide_home(json.dumps(["/root/runs", "/root", "/rootfs/a", "/mnt/root/b"])) == json.dumps(
        ["~/runs", "~", "/rootfs/a", "/mnt/root/b"]
    )
    monkeypatch.setenv("HOME", "/")
    assert hide_home("/root/runs") == "/root/runs" and "~" not in hide_home("a / b")
