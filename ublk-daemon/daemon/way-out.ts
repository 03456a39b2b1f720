/**
 * How a disk leaves the daemon: a row of WAYS_OUT each; nothing else in the daemon knows more than this interface.
 *
 * - A way out serves a target and does not own it: the daemon closes the target, after `detach` or `leave` has resolved.
 * - `record` is all that a later daemon needs to take over after this one was killed; it is kept in the table as JSON. What exists before
 *   the table has it, or still does when the table has it no more, is found by `sweep`.
 * - Nothing here may hang: `detach` ends clients that do not go, after a grace.
 */
import type { BlockTarget } from '../target/block-target.ts';
import { fileWay, loopWay } from './file-way.ts';
import { nbdWay } from './nbd-way.ts';
import { ublkWay } from './ublk-way.ts';

export const WAY_NAMES = ['ublk', 'nbd', 'file', 'loop'] as const;
export type WayName = (typeof WAY_NAMES)[number];

/** JSON; what differs by way: the address of a socket, the number of a device, a mount point. */
export type WayRecord = Readonly<Record<string, string | number | boolean>>;

export interface WayPlace {
  /** For sockets and mount points. It is there, this user's alone, and may be gone after a reboot. */
  readonly runDir: string;
  /** Marks what outlives a process as this daemon's own: a number of 32 bits, from its state folder. */
  readonly mark: number;
}

export interface WayOptions extends WayPlace {
  /** For people, and the name of exports: of the disk, or of the raw file without its folder. */
  readonly name: string;
  /** For file names: unique among what is attached, at most 80 bytes of letters, digits, dot, dash and underscore. */
  readonly label: string;
  readonly readOnly: boolean;
  /** Where the caller wants it. NBD: unix:PATH or tcp:HOST:PORT; ublk: /dev/ublkbN; file, loop: the path of a file. The way chooses where there is none. */
  readonly address?: string;
}

export interface Attachment {
  /** What the user gives to other programs: /dev/ublkb0, an NBD URI, /dev/loop0. */
  readonly at: string;
  readonly record: WayRecord;
  /** Rejects when it can serve no more by itself (a thread died, somebody unmounted it). */
  readonly failed?: Promise<never>;
  /** Who uses it now, for people ("mounted at /mnt", "2 clients"); undefined: nobody. */
  usedBy(): Promise<string | undefined>;
  /** The target has another size now: tells the clients. False, or missing: those that connect or open again see it. */
  resized?(): Promise<boolean>;
  /**
   * Ends and removes everything; what the target has not answered within `graceMs` fails. Afterwards nothing touches the target. Does
   * not ask `usedBy`: the daemon has. Twice is no error.
   */
  detach(graceMs: number): Promise<void>;
  /**
   * For a daemon that ends and will be followed by another one: leaves what clients can wait on (a device). Without it, `detach` is
   * called. The target answers nothing any more at that time.
   */
  leave?(): Promise<void>;
}

export interface WayOut {
  readonly name: WayName;
  /** Undefined: it works here. Else why it does not, in a few words. Costs little: asked by every attach with `auto`. */
  available(): Promise<string | undefined>;
  attach(target: BlockTarget, options: WayOptions): Promise<Attachment>;
  /** After a daemon died or left it: the same device, at the same address. Where it is gone (a reboot), a new one there. */
  recover(record: WayRecord, target: BlockTarget, options: WayOptions): Promise<Attachment>;
  /** Removes what a record names and nobody serves, where `sweep` would not find it. */
  forget?(record: WayRecord): Promise<void>;
  /** Removes what a daemon with this mark has left and none of `records` (of this way) names. Gives what it removed, for the log. */
  sweep?(records: readonly WayRecord[], place: WayPlace): Promise<readonly string[]>;
}

/** A new way out is a row here. */
export const WAYS_OUT: Readonly<Partial<Record<WayName, WayOut>>> = {
  ublk: ublkWay,
  nbd: nbdWay,
  file: fileWay,
  loop: loopWay,
};

/** What `auto` tries, in this order; the last one always works. */
export const AUTO_ORDER: readonly WayName[] = ['ublk', 'nbd'];
