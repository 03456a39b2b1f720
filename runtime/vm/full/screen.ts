/** The screen of a machine, its keyboard and its mouse, through QEMU's monitor. Whoever looks and types here needs nothing inside the guest. */
import { readFile, rm, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { fail } from '../../errors.ts';
import type { VmMonitor } from '../vm-driver.ts';
import { chordsOf, keyNamed } from './keyboard.ts';

export const BUTTONS = ['left', 'middle', 'right'] as const;
export type Button = (typeof BUTTONS)[number];

/** Coordinates are pixels of the picture. */
export type ScreenAction =
  /** Pressed in order, let go in reverse: ['ctrl', 'alt', 'delete']. */
  | { readonly type: 'key'; readonly keys: readonly string[] }
  | { readonly type: 'text'; readonly text: string }
  | { readonly type: 'move'; readonly x: number; readonly y: number }
  | {
      readonly type: 'click';
      readonly x?: number;
      readonly y?: number;
      readonly button?: Button;
      readonly count?: number;
    }
  | { readonly type: 'press' | 'release'; readonly button?: Button }
  /** Steps; up and to the left are negative. */
  | { readonly type: 'scroll'; readonly steps: number };

/** Guests that read a keyboard slowly lose what comes faster. */
const KEY_MS = 15;
const MOST_STEPS = 100;
const MOST_PICTURE = 64 << 20;
/** Of the axes of a tablet, whatever the screen's size. */
const AXIS = 0x7fff;
const PNG = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);

export interface ScreenHost {
  readonly folder: string;
  readonly qmp: VmMonitor;
}

let pictures = 0;
/** The last picture of each machine: one after the other, so that many who look at once take the room of one. */
const turns = new WeakMap<VmMonitor, Promise<unknown>>();

/** A picture of it, as PNG. @throws VM_INPUT */
export function screenshot(host: ScreenHost): Promise<Buffer> {
  const taken = (turns.get(host.qmp) ?? Promise.resolve()).then(() => takePicture(host));
  turns.set(
    host.qmp,
    taken.catch(() => {}),
  );
  return taken;
}

async function takePicture({ folder, qmp }: ScreenHost): Promise<Buffer> {
  const path = join(folder, `screen-${++pictures}.png`);
  try {
    await qmp.execute('screendump', { filename: path, format: 'png' });
    // The guest chooses its size.
    const { size } = await stat(path);
    if (size > MOST_PICTURE) throw fail('VM_INPUT', { problem: `a picture of ${size} bytes is too large` });
    return await readFile(path);
  } finally {
    await rm(path, { force: true });
  }
}

/** By how it begins. */
export function isPng(bytes: Buffer): boolean {
  return bytes.length >= 24 && bytes.subarray(0, PNG.length).equals(PNG);
}

export function pictureSize(png: Buffer): { readonly width: number; readonly height: number } {
  if (!isPng(png)) throw fail('VM_INPUT', { problem: 'the screen gave no picture' });
  return { width: png.readUInt32BE(16), height: png.readUInt32BE(20) };
}

/** In order. @throws VM_INPUT before anything is done when one of them cannot be */
export async function act(host: ScreenHost, actions: readonly ScreenAction[]): Promise<void> {
  const checked = actions.map(checkedAction);
  const places = checked.some((action) => 'x' in action && action.x !== undefined);
  // The guest may have chosen another size than the one it was given.
  const size = places ? pictureSize(await screenshot(host)) : { width: 1, height: 1 };
  for (const action of checked) {
    if ('x' in action && action.x !== undefined && action.y !== undefined) at(action.x, action.y, size);
  }
  const send = (events: readonly object[]) => host.qmp.execute('input-send-event', { events });
  for (const action of checked) {
    switch (action.type) {
      case 'key':
        await pressChord(send, action.keys);
        break;
      case 'text':
        for (const chord of chordsOf(action.text)) await pressChord(send, chord);
        break;
      case 'move':
        await send(at(action.x, action.y, size));
        break;
      case 'click':
        if (action.x !== undefined && action.y !== undefined) await send(at(action.x, action.y, size));
        for (let click = 0; click < (action.count ?? 1); click++) {
          await send([button(action.button, true)]);
          await delay(KEY_MS);
          await send([button(action.button, false)]);
          await delay(KEY_MS);
        }
        break;
      case 'press':
      case 'release':
        await send([button(action.button, action.type === 'press')]);
        break;
      case 'scroll':
        for (let step = 0; step < Math.abs(action.steps); step++) {
          const wheel = action.steps < 0 ? 'wheel-up' : 'wheel-down';
          await send([button(wheel, true)]);
          await send([button(wheel, false)]);
        }
        break;
    }
  }
}

function checkedAction(action: ScreenAction): ScreenAction {
  const refuse = (problem: string) => fail('VM_INPUT', { problem });
  if (action.type === 'key') {
    if (action.keys.length === 0) throw refuse('no keys');
    return { ...action, keys: action.keys.map(keyNamed) };
  }
  if (action.type === 'text') chordsOf(action.text);
  if (action.type === 'click' && (action.x === undefined) !== (action.y === undefined))
    throw refuse('a click has x and y, or neither');
  if (action.type === 'scroll' && !(Math.abs(action.steps) <= MOST_STEPS))
    throw refuse(`${action.steps} steps: at most ${MOST_STEPS}`);
  return action;
}

async function pressChord(
  send: (events: readonly object[]) => Promise<unknown>,
  chord: readonly string[],
): Promise<void> {
  for (const key of chord) await send([keyEvent(key, true)]);
  await delay(KEY_MS);
  for (const key of [...chord].reverse()) await send([keyEvent(key, false)]);
  await delay(KEY_MS);
}

function keyEvent(key: string, down: boolean): object {
  return { type: 'key', data: { down, key: { type: 'qcode', data: key } } };
}

function button(name: string = 'left', down: boolean): object {
  return { type: 'btn', data: { down, button: name } };
}

function at(x: number, y: number, { width, height }: { readonly width: number; readonly height: number }): object[] {
  if (!(x >= 0 && x < width && y >= 0 && y < height)) {
    throw fail('VM_INPUT', { problem: `${x},${y} is outside the screen of ${width} x ${height}` });
  }
  const axis = (name: string, value: number, size: number) => ({
    type: 'abs',
    data: { axis: name, value: Math.round((value * AXIS) / Math.max(1, size - 1)) },
  });
  return [axis('x', x, width), axis('y', y, height)];
}
