"""What is counted in a compiled program, in programs whose bytes are known."""

import jax
import jax.numpy as jnp
import pytest
from compiled import OPTIMIZED

from benchmarks import hlo

KERNELS = """\
%f (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%g (p: f32[1024,2], q: f16[4], r: f32[1024,2]) -> (f32[1024,2], f16[4]) {
  %r = f32[1024,2]{1,0} parameter(2)
  %p = f32[1024,2]{1,0} parameter(0)
  %q = f16[4]{0} parameter(1)
  %s = f32[1024,2]{1,0} add(%p, %r)
  %n = f16[4]{0} negate(%q)
  ROOT %t = (f32[1024,2]{1,0}, /*index=1*/f16[4]{0}) tuple(%s, %n)
}

ENTRY %main (a: f32[1024,2], b: f16[4], c: f32[8], d: pred[]) -> (f32[1024,2], pred[]) {
  %a = f32[1024,2]{1,0} parameter(0)
  %b = f16[4]{0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %d = pred[] parameter(3)
  %v = f32[8]{0:T(8)S(1)} fusion(%c), kind=kLoop, calls=%f, "estimated_cycles":"7"
  %copy.1 = f32[1024,2]{0,1} copy(%a)
  %f = (f32[1024,2]{1,0}, /*index=1*/f16[4]{0}) fusion(%a, %b, %a), kind=kLoop, calls=%g, \
"exec_time_us":1.5,"compute_time_us":1,"name":"" "exec_time_us":9,"name":"sol"
  %e = pred[] not(%d)
  %r = pred[]{:T(512)} all-reduce-start(%e), replica_groups={}, to_apply=%and
  %done = pred[] all-reduce-done(%r)
  ROOT %t = (f32[1024,2]{1,0}, pred[]) tuple(%copy.1, %done)
}
"""


def test_kernels_read_each_operand_once_and_write_their_results():
    assert hlo.count(KERNELS) == hlo.Counts(
        # In the order of the lines: fused into fast memory, copied, fused, negated, exchanged.
        bytes=32 + 2 * 8192 + 2 * (8192 + 8) + 2 + 2,
        kernels=5,
        copies=1,
        collectives=1,
        exchanged=1,
        microseconds=1.5,
        cycles=7,
    )


LOOPS = """\
%f (p: f32[8,16], q: f32[8,16], r: f32[16], i: s32[]) -> (f32[16], f32[8,16]) {
  %q = f32[8,16]{1,0} parameter(1)
  %p = f32[8,16]{1,0} parameter(0)
  %i = s32[] parameter(3)
  %b = f32[128]{0} bitcast(%p)
  %x = f32[16]{0} dynamic-slice(%b, %i), dynamic_slice_sizes={16}
  %y = f32[16]{0} slice(%b), slice={[0:16]}
  %s = f32[16]{0} add(%x, %y)
  %r = f32[16]{0} parameter(2)
  %n = f32[1,16]{1,0} bitcast(%r)
  %u = f32[8,16]{1,0} dynamic-update-slice(%q, %n, %i, %i)
  ROOT %t = (f32[16]{0}, f32[8,16]{1,0}) tuple(%s, %u)
}

%inner_goes_on (p: (f32[8,16], f32[8,16], f32[16], s32[])) -> pred[] {
  %p = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[16]{0}, s32[]) parameter(0)
  %c = f32[16]{0} get-tuple-element(%p), index=2
  ROOT %y = pred[] custom-call(%c)
}

%outer_goes_on (p: (f32[8,16], f32[8,16], f32[16], s32[])) -> pred[] {
  %p = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[16]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=3
  %n = s32[]{:T(128)} constant(7)
  ROOT %y = pred[] compare(%i, %n), direction=LT
}

%inner (p: (f32[8,16], f32[8,16], f32[16], s32[])) -> (f32[8,16], f32[8,16], f32[16], s32[]) {
  %p = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[16]{0}, s32[]) parameter(0)
  %a = f32[8,16]{1,0} get-tuple-element(%p), index=0
  %b = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %c = f32[16]{0} get-tuple-element(%p), index=2
  %i = s32[] get-tuple-element(%p), index=3
  %r = f32[16]{0} all-reduce(%c), to_apply=%add
  %f = (f32[16]{0}, f32[8,16]{1,0}) fusion(%a, %b, %r, %i), kind=kLoop, calls=%f
  %x = f32[16]{0} get-tuple-element(%f), index=0
  %u = f32[8,16]{1,0} get-tuple-element(%f), index=1
  ROOT %t = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[16]{0}, s32[]) tuple(%a, %u, %x, %i)
}

%outer (q: (f32[8,16], f32[8,16], f32[16], s32[])) -> (f32[8,16], f32[8,16], f32[16], s32[]) {
  %q = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[16]{0}, s32[]) parameter(0)
  ROOT %w = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[16]{0}, s32[]) while(%q), body=%inner, \
condition=%inner_goes_on
}

ENTRY %main (a: f32[8,16], b: f32[8,16], c: f32[16]) -> f32[1,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  %c = f32[16]{0} parameter(2)
  %i = s32[]{:T(128)} constant(2)
  %t = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[16]{0}, s32[]) tuple(%a, %b, %c, %i)
  %w = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[16]{0}, s32[]) while(%t), condition=%outer_goes_on, \
body=%outer, backend_config={"known_trip_count":{"n":"5"},"dynamic_variables":[]}
  %x = f32[8,16]{1,0} get-tuple-element(%w), index=1
  ROOT %y = f32[1,16]{1,0} slice(%x), slice={[2:3], [0:16]}
}
"""


@pytest.mark.parametrize("trips", [1, 3.5])
@pytest.mark.parametrize("text", [LOOPS, LOOPS.replace("known_trip_count", "unknown")])
def test_loops_count_as_often_as_they_run_and_slices_at_their_own_size(text, trips):
    # Each turn exchanges 64 bytes, reads two slices and writes one; an index takes four bytes.
    turn = 2 * 64 + (2 * 64 + 64 + 64 + 64 + 4)
    assert hlo.count(text, unknown_trips=trips) == hlo.Counts(
        bytes=5 * trips * turn + 2 * 64,
        kernels=5 * trips * 2 + 1,
        collectives=5 * trips,
        exchanged=5 * trips * 64,
    )


def test_a_loop_that_starts_from_an_argument_runs_unknown_times():
    text = LOOPS.replace("known_trip_count", "unknown")
    text = text.replace("%i = s32[]{:T(128)} constant(2)", "%i = s32[] parameter(3)")
    assert hlo.count(text, unknown_trips=2) == hlo.count(
        LOOPS.replace('"n":"5"', '"n":"2"'), unknown_trips=2
    )


def test_a_slice_is_no_larger_than_the_array():
    twice = LOOPS.replace("%y = f32[16]{0} slice(%b)", "%y = f32[128]{0} slice(%b)")
    more = hlo.count(twice).bytes - hlo.count(LOOPS).bytes
    assert more == 5 * (512 - 2 * 64)


SIZE = 2**16


def layers(x, stack):
    return jax.lax.scan(lambda x, layer: (jnp.sin(x) * layer, None), x, stack)[0]


def mapped(_, stack):
    return jax.lax.map(jnp.sin, stack)


def nested(x, stack):
    def turn(x, layer):
        return jax.lax.fori_loop(0, 8, lambda _, x: jnp.sin(x), x) * layer, None

    return jax.lax.scan(turn, x, stack)[0]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("fun", "passes"),
    [
        (layers, 3),  # the carry is read and written, and a layer read
        (mapped, 3),  # one is read and one written, in an array that was filled with zeros
        (nested, 8 * 2 + 3),
    ],
)
def test_a_compiled_loop_reads_and_writes_what_each_turn_does(fun, passes):
    def count(turns):
        shapes = (jax.ShapeDtypeStruct((*n, SIZE), jnp.float32) for n in ((), (turns,)))
        text = jax.jit(fun).lower(*shapes).compile(OPTIMIZED).as_text()
        return hlo.count(text).bytes / (4 * SIZE)

    assert count(24) - count(8) == pytest.approx(16 * passes, rel=1e-3)
