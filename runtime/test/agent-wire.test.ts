/** Frames and payloads of dsec-agent's protocol, cut and damaged; the greeting of a client. */
import { describe, expect, it } from 'vitest';
import {
  FRAME,
  FrameParser,
  frameBytes,
  MAX_PAYLOAD_BYTES,
  PayloadWriter,
  PROTOCOL_VERSION,
} from '../backend/agent-wire.ts';
import { parseGreeting } from '../service/greeting.ts';

function greeting(
  command: readonly (string | Buffer)[],
  env: readonly string[] = [],
  version = PROTOCOL_VERSION,
): Buffer {
  const out = new PayloadWriter();
  out.u32(version).bytes('build');
  out.list(command, (value) => out.bytes(value));
  out.list(env, (value) => out.bytes(value));
  return out.bytes('/here').u8(0b101).u16(24).u16(80).done();
}
describe('frames', () => {
  const frames = [
    frameBytes(FRAME.started, 7, Buffer.from([1, 2, 3, 4])),
    frameBytes(FRAME.ready, 0xffffffff, Buffer.alloc(0)),
    frameBytes(FRAME.client, 1, Buffer.alloc(70_000, 5)),
  ];

  it.each([1, 2, 8, 9, 10, 1000, 1 << 20])('come whole, however the stream is cut: %i bytes at a time', (size) => {
    const stream = Buffer.concat(frames);
    const parser = new FrameParser();
    const found = [];
    for (let at = 0; at < stream.length; at += size) found.push(...parser.push(stream.subarray(at, at + size)));
    expect(found.map(({ kind, id, payload }) => [kind, id, payload.length])).toEqual([
      [FRAME.started, 7, 4],
      [FRAME.ready, 0xffffffff, 0],
      [FRAME.client, 1, 70_000],
    ]);
    expect(found[0]!.payload).toEqual(Buffer.from([1, 2, 3, 4]));
  });

  it('have a golden form', () => {
    expect(frames[0]!.toString('hex')).toBe('04000000650700000001020304');
  });

  it('are refused beyond the limit, before anything is kept', () => {
    const head = Buffer.alloc(9);
    head.writeUInt32LE(MAX_PAYLOAD_BYTES + 1, 0);
    expect(() => new FrameParser().push(head)).toThrow(/8388609 bytes/);
  });
});

describe('a greeting', () => {
  it('tells all that a command line hangs on', () => {
    expect(parseGreeting(greeting(['/d', 'run', 'ü'], ['A=1', 'B=', 'A=2', 'odd', '=C:=x']))).toEqual({
      build: 'build',
      command: ['/d', 'run', 'ü'],
      env: Object.assign(Object.create(null), { A: '1', B: '', '=C:': 'x' }),
      cwd: '/here',
      terminals: [true, false, true],
      inputIsNull: false,
      terminalSize: { rows: 24, columns: 80 },
    });
  });

  it('is not for us in another version, or when it is not UTF-8', () => {
    expect(parseGreeting(greeting(['x'], [], PROTOCOL_VERSION + 1))).toBeUndefined();
    expect(parseGreeting(greeting([Buffer.from([0xff])]))).toBeUndefined();
  });

  it('is refused wherever it is cut, and bears every damaged byte', () => {
    const bytes = greeting(['/d', 'run'], ['A=1']);
    for (let cut = 4; cut < bytes.length; cut++) {
      expect(() => parseGreeting(bytes.subarray(0, cut))).toThrow(/too short/);
    }
    for (let at = 0; at < bytes.length; at++) {
      const damaged = Buffer.from(bytes);
      damaged[at]! ^= 0xff;
      try {
        parseGreeting(damaged);
      } catch (error) {
        expect((error as { code?: string }).code).toBe('RUNTIME_AGENT_PROTOCOL');
      }
    }
  });
});
