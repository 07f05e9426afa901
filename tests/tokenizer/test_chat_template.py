from __future__ import annotations

import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from topg.errors import ChatTemplateError, CheckpointError
from topg.tokenizer.chat_template import ChatTemplate, huggingface_chat_template

MESSAGES = [{"role": "user", "content": "hi <b>"}, {"role": "assistant", "content": "é"}]


def render(source: str, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, **options).render(MESSAGES, None, True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].role }}{{ messages[0]['content'] }}", "<s>userhi <b>"),
        ("{{ messages[1] | tojson }}", '{"role": "assistant", "content": "é"}'),
        ("{{ {'a': '<&>'} | tojson(indent=1) }}", '{\n "a": "<&>"\n}'),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.length }}{% endfor %}", "2"),
        ("{% set ns = namespace(n='') %}{% for m in messages %}{% set ns.n = ns.n ~ m.role %}{% endfor %}{{ ns.n }}",
         "userassistant"),
        ("{% macro f(x) %}({{ x }}){% endmacro %}{{ f('a') }}{{ f(1 + 2) }}", "(a)(3)"),
        ("{{ messages[::-1] | map(attribute='role') | join(',') }}", "assistant,user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'a,b'.split(',')[-1] }}{{ '%s!' % 'x' }}{{ '{}?'.format('y') }}{{ 'z'.rstrip('z') }}", "bx!y?"),
        ("{% if add_generation_prompt %}\n  yes\n{% endif %}\n", "  yes\n"),
        ("{% for k, v in messages[1].items() %}{{ k }}={{ v }};{% endfor %}", "role=assistant;content=é;"),
        ("{{ tools is none }}{{ unknown is defined }}{{ unknown }}", "TrueFalse"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source) == text


def test_date_comes_from_the_clock_given() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26)) == "26 Jul 2024"


def test_refusal_carries_the_template_s_own_words() -> None:
    with pytest.raises(ChatTemplateError, match="System role not supported") as caught:
        render("{{ raise_exception('System role not supported') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages | attr('__class__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ (strftime_now.__self__ or x).__init__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{% include '/etc/hostname' %}",
    "{% import 'os' as os %}",
    "{% extends 'base' %}",
    "{{ lipsum.__globals__ }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
])  # fmt: skip
def test_ways_out_are_closed(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_attribute_walk_leaves_no_mark(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    walk = "{{ cycler.__init__.__globals__.os.system('touch " + str(marker) + "') }}"
    with pytest.raises(ChatTemplateError):
        render(walk)
    assert not marker.exists()


@pytest.mark.parametrize("source", [
    "{{ 'a' * 10**9 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000s' | format('a') }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ ('\t' * 1000).expandtabs(1000000000) }}",
    "{{ range(100000) | join('a' * 100000) }}",
    "{{ ('a' * 100000).join(range(100000) | map('string')) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a\n' * 100000) | indent(10000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ {}.fromkeys(range(100000), 'a' * 100000) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set a = ['x'] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b, b, b, b, b] * 1000 %}{{ c }}",
    "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% set x %}{% for i in range(100000) %}" + "a" * 100_000 + "{% endfor %}{% endset %}{{ x | length }}",
    "{% macro f() %}" + "a" * 100_000 + "{% endmacro %}"
    "{% set x %}{% for i in range(1000) %}{{ f() }}{% endfor %}{% endset %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ strftime_now('%c' * 100000) }}",
])  # fmt: skip
def test_large_results_are_refused_before_they_are_built(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(ChatTemplateError):
        render(source)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("source", [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
])  # fmt: skip
def test_time_limit_holds_in_any_thread(source: str) -> None:
    caught: list[ChatTemplateError] = []

    def work() -> None:
        try:
            render(source, max_seconds=0.2)
        except ChatTemplateError as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert len(caught) == 1


def test_output_limit() -> None:
    assert render("{{ 'a' * 50 }}", max_chars=100) == "a" * 50
    with pytest.raises(ChatTemplateError, match="100 characters"):
        render("{% for i in range(3) %}{{ 'a' * 50 }}{% endfor %}", max_chars=100)


def test_one_rendering_does_not_use_up_the_limits_of_the_next() -> None:
    template = ChatTemplate("{{ messages[0].content * 30 }}", {}, max_chars=200)
    for _ in range(50):
        assert template.render([{"role": "user", "content": "abcd"}]) == "abcd" * 30


def test_template_of_a_folder() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert huggingface_chat_template({"chat_template": "A"}, None) == "A"
    assert huggingface_chat_template({"chat_template": "A"}, "B") == "B"
    assert huggingface_chat_template({"chat_template": named}, None) == "D"
    assert huggingface_chat_template(None, None) is None
    with pytest.raises(CheckpointError, match="default"):
        huggingface_chat_template({"chat_template": named[:1]}, None)
