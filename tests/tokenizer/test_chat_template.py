from __future__ import annotations

import threading
import tracemalloc
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from topg.errors import ChatTemplateError
from topg.tokenizer.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi <b>"}, {"role": "assistant", "content": "é"}]
BIG = "{{ 0x1" + "0" * 20_000  # a number of 80,000 bits, which a template can write down
LONG = "{% set x = 'a' * 3999999 %}"
LARGEST_PEAK = 150_000_000  # bytes


def render(source: str, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, **options).render(MESSAGES)


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
        ("{{ messages | map(attribute='role') | join(', ') }}", "user, assistant"),
        ("{{ ', '.join(messages | map(attribute='role')) }}", "user, assistant"),
        ("{{ messages | map(attribute='role') | unique | sort | join('+') }}", "assistant+user"),
        ("{{ messages | map(attribute='role') | list | string }}", "['user', 'assistant']"),
        ("{{ [3, 1, 2] | select('gt', 1) | sum }}{{ [3, 1, 2] | reject('odd') | max }}", "52"),
        ("{{ 'user' in messages | map(attribute='role') }}", "True"),
        ("{{ 'system' is in (messages | map(attribute='role')) }}", "False"),
        ("{{ dict(messages[1] | items | map('reverse') | map('list')) | tojson }}",
         '{"assistant": "role", "é": "content"}'),
        ("{{ [{'a': {'b': 'x'}}] | join(',', attribute='a.b') }}", "x"),
        ("{{ messages | groupby('role') | map('first') | join(',') }}", "assistant,user"),
        ("{% if messages | selectattr('role', 'equalto', 'tool') %}an iterator is true{% endif %}",
         "an iterator is true"),
        ("{{ 'a  b\n c' | replace(new='-', old=' ') }}{{ 'a\nb' | indent(first=true, width=2) }}",
         "a--b\n-c  a\n  b"),
        ("{{ '7' | int + 9 // 2 }}{{ 6 is divisibleby(num=3) }}{{ '17' | int(base=8) }}{{ 'a\tb'.expandtabs(2) }}",
         "11True15a b"),
        ("{% for m in messages | selectattr('role', 'ne', 'x') %}{{ loop.index }}{{ loop.last }}{% endfor %}",
         "1False2True"),
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
    "{% autoescape true %}{{ messages }}{% endautoescape %}",
    "{{ ['a'] | map('loop items', -10**15) | list }}",
    "{{ ['a'] | map('macro body') | list }}",
    "{{ 'a' | safe.__class__ }}",
    "{{ ('a' | safe).unescape() }}",
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
    "{{ ('a' * 100000).join(range(10000) | map('string')) }}",
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
    "{{ ('\t' * 20000).expandtabs(10000) }}",
    "{{ ('\t' * 20000).expandtabs(tabsize=10000) }}",
    "{{ 'a' | indent(first=true, width=20000000) }}",
    "{{ ('a\r' * 100000) | indent(10000) }}",
    "{{ ('a' * 200000) | replace(new='b' * 2000, old='a') }}",
    "{{ ('a' * 100000) | replace('a', ['b' * 100000]) }}",
    "{{ 'a' | center(width=20000000) }}",
    "{{ '%1000000000s' is odd }}",
    "{{ '%1000000000s' is divisibleby 3 }}",
    "{{ '%1000000000s' is divisibleby(num=3) }}",
    "{{ ['%1000000000s'] | select('divisibleby', 3) | list }}",
    "{{ ('{:>9999}' * 1000).format(*range(1000)) }}",
    "{{ [1] | tojson(separators=('a' * 1000000, ':')) }}",
    "{{ 'a' | round(precision=1000000) }}",
    "{{ ('1' * 5000) | int(base=8) }}",
    "{{ ('1' * 5000) | int(0, 8) // 3 }}",
    "{{ ['1' * 5000] | map('int', base=8) | list }}",
    "{{ ('1' * 5000) | float }}",
    BIG + " // " + BIG + " }}",
    BIG + " % " + BIG + " }}",
    BIG + " - " + BIG + " }}",
    BIG + " is divisibleby 3 }}",
    LONG + "{{ range(100000) | map(attribute='q', default=x) | list }}",
    LONG + "{{ range(100000) | map(attribute='q', default=x) | sort }}",
    LONG + "{{ range(100000) | map(attribute='q', default=x) | max }}",
    LONG + "{{ range(100000) | map(attribute='q', default=x) | unique | list }}",
    LONG + "{{ range(100000) | map(attribute='q', default=x) | join(attribute='0') }}",
    LONG + "{{ ''.join(range(100000) | map(attribute='q', default=x)) }}",
    LONG + "{{ dict(range(100000) | map('string') | map('list') | map(attribute='q', default=[x, x])) }}",
    LONG + "{{ [{'a': x}] | sort(attribute='a,' * 400 ~ 'a') }}",
    "{{ [{}] | map(attribute='a.' * 100000) | list }}",
    "{% for i in [1, 2] %}{{ [loop] * 100000 }}{% endfor %}",
    LONG + "{{ x.rfind('b' ~ x[:1000000]) }}",
    LONG + "{{ x.rsplit('b' ~ x[:1000000]) }}",
    LONG + "{{ x.strip('b' * 1000000 ~ 'a') }}",
    LONG + "{{ x | trim(chars='b' * 1000000 ~ 'a') }}",
    LONG + "{{ x | list }}",
    LONG + "{{ x.split('a') }}",
    LONG + "{{ x | sort }}",
    LONG + "{{ x | join('a') }}",
    "{{ ('a ' * 1500000).split() }}",
    "{{ ('a\r' * 1500000).splitlines() }}",
    "{{ ('-a' * 1500000) | title }}",
    "{{ ('<' * 1500000) | escape }}",
    "{{ ('<' * 1500000) | urlencode }}",
    "{{ ((('a' * 100000) | safe).replace('a', 'b' * 100000)) }}",
])  # fmt: skip
def test_large_results_are_refused_before_they_are_built(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            render(source, max_seconds=60)
        assert tracemalloc.get_traced_memory()[1] < LARGEST_PEAK
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
])  # fmt: skip
def test_time_limit_holds_in_any_thread(source: str) -> None:
    caught: list[ChatTemplateError] = []
    looks = count()  # each look at the clock is a second later

    def work() -> None:
        try:
            render(source, max_seconds=5000, clock=looks.__next__)
        except ChatTemplateError as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert len(caught) == 1 and "seconds" in str(caught[0])


def test_the_clock_is_looked_at_in_straight_lines_too() -> None:
    looks = count()
    with pytest.raises(ChatTemplateError, match="seconds"):
        render("{% set x = bos_token == 'a' %}" * 100, max_seconds=50, clock=looks.__next__)


@pytest.mark.parametrize("source", ["{{a}}" * 10_000, "a" * 300_000, "{{ " + "a + " * 20_000 + "a }}"])
def test_a_template_too_large_to_compile_in_time_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"tokens|characters"):
        render(source)


def test_output_limit() -> None:
    assert render("{{ 'a' * 50 }}", max_chars=100) == "a" * 50
    with pytest.raises(ChatTemplateError, match="100 characters"):
        render("{% for i in range(3) %}{{ 'a' * 50 }}{% endfor %}", max_chars=100)


def test_one_rendering_does_not_use_up_the_limits_of_the_next() -> None:
    template = ChatTemplate("{{ messages[0].content * 30 }}", {}, max_chars=200)
    for _ in range(50):
        assert template.render([{"role": "user", "content": "abcd"}]) == "abcd" * 30
