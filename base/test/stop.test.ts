import { describe, expect, it } from 'vitest';
import { abortSignalOf, StopController, type StopSignal } from '../stop.ts';

describe('StopController', () => {
  it('tells its listeners once, in order, with the first reason', () => {
    const stop = new StopController();
    const heard: string[] = [];
    const gone = () => heard.push('gone');
    stop.signal.addEventListener('abort', () => heard.push('a'));
    stop.signal.addEventListener('abort', gone);
    stop.signal.addEventListener('abort', () => heard.push('b'));
    stop.signal.removeEventListener('abort', gone);
    stop.signal.throwIfAborted();
    const [first, second] = [new Error('first'), new Error('second')];
    stop.abort(first);
    stop.abort(second);
    expect(heard).toEqual(['a', 'b']);
    expect(stop.signal).toMatchObject({ aborted: true, reason: first });
    expect(() => stop.signal.throwIfAborted()).toThrow(first);
    // As with an AbortSignal, who comes too late hears nothing.
    stop.signal.addEventListener('abort', () => heard.push('late'));
    stop.abort(second);
    expect(heard).toEqual(['a', 'b']);
  });

  it('may be listened to by a listener, and left by one', () => {
    const stop = new StopController();
    const { signal } = stop;
    const heard: number[] = [];
    const second = () => heard.push(2);
    signal.addEventListener('abort', () => {
      heard.push(1);
      signal.removeEventListener('abort', second);
      signal.addEventListener('abort', () => heard.push(3));
    });
    signal.addEventListener('abort', second);
    stop.abort();
    expect(heard[0]).toBe(1);
    expect(heard).not.toContain(3);
  });

  it('becomes an AbortSignal for those who need one; an AbortSignal is one already', () => {
    const stop = new StopController();
    const signal = abortSignalOf(stop.signal);
    expect(signal.aborted).toBe(false);
    const reason = new Error('enough');
    stop.abort(reason);
    expect(signal).toMatchObject({ aborted: true, reason });
    expect(abortSignalOf(stop.signal)).toMatchObject({ aborted: true, reason });
    const own: StopSignal = new AbortController().signal;
    expect(abortSignalOf(own)).toBe(own);
  });
});
