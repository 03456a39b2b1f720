/**
 * The clipboards of a machine whose guest has SPICE's agent (spice-vdagent; vdservice of Windows): a port of virtio-serial of its own, of which QEMU knows
 * nothing, so that the machine can be paused (QEMU's own end of it forbids that).
 *
 * A clipboard belongs to whoever offered last. What is put there from here is kept here (clipboard-file.ts) and given when the guest asks; what the guest
 * offers is asked for when somebody here wants it. The agent forgets all of that whenever either end of the connection goes; then it is offered again.
 *
 * What the guest sends is read by vdagent-wire.ts. Nonsense, or an answer that does not come, costs the connection, and the next one is made a moment later:
 * its agent sees that it has gone, and begins anew.
 */
import { connect, type Socket } from 'node:net';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';
import {
  CLIPBOARD_TYPES,
  type ClipboardContent,
  type ClipboardType,
  type KeptContents,
  MOST_CLIPBOARD_BYTES,
  readClipboard,
  SELECTIONS,
  type Selection,
  writeClipboard,
} from './clipboard-file.ts';
import {
  VDAGENT,
  VDAGENT_CAPABILITY,
  type VdAgentMessage,
  VdAgentReader,
  vdAgentMessage,
  vdAgentNumbers,
} from './vdagent-wire.ts';

/** Name of its port, as agents look for it. */
export const CLIPBOARD_PORT = 'com.redhat.spice.0';

export interface ClipboardHost {
  /** Of the machine, for errors. */
  readonly id: string;
  readonly socket: string;
  /** Where contents are kept. */
  readonly file: string;
  /** Shorter in tests. */
  readonly answerMs?: number;
  readonly againMs?: number;
}

interface Asked {
  readonly selection: Selection;
  readonly type: ClipboardType;
  readonly resolve: (bytes: Buffer) => void;
  readonly reject: (error: Error) => void;
}

/** Emulated guests are slow. */
const ANSWER_MS = 15_000;
/** Of what is fetched before a pause, which waits for it. */
const KEEP_MS = 3_000;
/** The guest has to see that its connection has gone; a slow one, or one without an agent, is given longer each time. */
const AGAIN_MS = 500;
const MOST_AGAIN_MS = 30_000;
const MOST_TRIES = 3;
/** Of messages that say what there is, and nothing of it. */
const MAX_NOTICE_BYTES = 4 << 10;
/** What may wait for a guest to read it. */
const MAX_UNREAD_BYTES = 2 * MOST_CLIPBOARD_BYTES;
/** Of a selection. */
const PREFIX_BYTES = 4;
const TYPE_BYTES = 4;
const NONE = 0;
const OURS = (1 << VDAGENT_CAPABILITY.byDemand) | (1 << VDAGENT_CAPABILITY.selection);
/** Of a type in messages: 1 and 2. */
const typeNumber = (type: ClipboardType) => CLIPBOARD_TYPES.indexOf(type) + 1;

export class GuestClipboard {
  private readonly host: ClipboardHost;
  private kept: KeptContents;
  private saving: Promise<void> = Promise.resolve();
  /** What the guest offers. */
  private readonly offered = new Map<Selection, readonly ClipboardType[]>();
  private socket: Socket | undefined;
  /** Of the agent; undefined: it has not said what it can. */
  private capabilities: number | undefined;
  private readonly whenReady = new Set<() => void>();
  private asked: Asked | undefined;
  private again: NodeJS.Timeout | undefined;
  /** Nobody has answered on the connection that there is. */
  private late: NodeJS.Timeout | undefined;
  /** Connections that ended since the agent last said what it can. */
  private drops = 0;
  private isClosed = false;
  private turn: Promise<void> = Promise.resolve();

  constructor(host: ClipboardHost) {
    this.host = host;
    this.kept = readClipboard(host.file);
    this.open();
  }

  /** Undefined: nothing of this type is there. @throws VM_CLIPBOARD */
  get(selection: Selection, type: ClipboardType): Promise<Buffer | undefined> {
    return this.inTurn(async () => {
      await this.ready(selection);
      const offered = this.offered.get(selection);
      if (offered !== undefined) return offered.includes(type) ? this.ask(selection, type, this.answerMs) : undefined;
      const kept = this.kept.get(selection);
      return kept?.type === type ? kept.bytes : undefined;
    });
  }

  /** From now on whoever pastes in the guest gets it. @throws VM_CLIPBOARD */
  set(selection: Selection, content: ClipboardContent): Promise<void> {
    return this.inTurn(async () => {
      await this.ready(selection);
      await this.save((kept) => kept.set(selection, { ...content, isGuests: false }));
      this.offered.delete(selection);
      this.send(VDAGENT.grab, selection, vdAgentNumbers(typeNumber(content.type)));
    });
  }

  /** Before its machine stands still: what the guest offers is kept here, since its agent begins anew afterwards. */
  keep(): Promise<void> {
    return this.inTurn(async () => {
      for (const [selection, [type]] of [...this.offered]) {
        // With an answer that does not come the connection goes, and all that was offered on it.
        if (type === undefined || !this.offered.has(selection)) continue;
        try {
          const bytes = await this.ask(selection, type, Math.min(KEEP_MS, this.answerMs));
          await this.save((kept) => kept.set(selection, { type, bytes, isGuests: true }));
        } catch {
          // The other one may be had.
        }
      }
    });
  }

  close(): void {
    this.isClosed = true;
    clearTimeout(this.again);
    this.drop('it is closed');
    for (const wake of this.whenReady) wake();
  }

  private get answerMs(): number {
    return this.host.answerMs ?? ANSWER_MS;
  }

  private inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = this.turn.then(work);
    const ignore = () => {};
    this.turn = done.then(ignore, ignore);
    return done;
  }

  private refuse(problem: string, cause?: unknown): Error {
    return fail('VM_CLIPBOARD', { id: this.host.id, problem }, cause);
  }

  /** Its agent has said what it can. @throws VM_CLIPBOARD */
  private async ready(selection: Selection): Promise<void> {
    if (this.capabilities === undefined) {
      if (this.isClosed) throw this.refuse('its machine stands still');
      if (this.socket === undefined) this.open();
      await this.answered();
      if (this.capabilities === undefined) throw this.refuse('its agent does not answer');
    }
    if (!this.has('byDemand')) throw this.refuse('its agent has none');
    if (selection !== 'clipboard' && !this.has('selection')) throw this.refuse(`its agent has no ${selection}`);
  }

  private async answered(): Promise<void> {
    let wake = () => {};
    let timer: NodeJS.Timeout | undefined;
    await new Promise<void>((resolve) => {
      wake = resolve;
      timer = setTimeout(resolve, MOST_TRIES * this.answerMs);
      this.whenReady.add(wake);
    });
    clearTimeout(timer);
    this.whenReady.delete(wake);
  }

  private has(capability: keyof typeof VDAGENT_CAPABILITY): boolean {
    return ((this.capabilities ?? 0) & (1 << VDAGENT_CAPABILITY[capability])) !== 0;
  }

  private async ask(selection: Selection, type: ClipboardType, timeoutMs: number): Promise<Buffer> {
    let timer: NodeJS.Timeout | undefined;
    try {
      const bytes = await new Promise<Buffer>((resolve, reject) => {
        this.asked = { selection, type, resolve, reject };
        timer = setTimeout(() => {
          // Else its answer could be taken for that to the next question.
          this.drop('its agent does not answer');
        }, timeoutMs);
        this.send(VDAGENT.request, selection, vdAgentNumbers(typeNumber(type)));
      });
      return type === 'text/plain' ? textOf(bytes, this.has('carriageReturns')) : bytes;
    } finally {
      clearTimeout(timer);
      this.asked = undefined;
    }
  }

  /** @param change Of what is kept when its turn has come. @throws RUNTIME_RECORD_WRITE; then all is as before */
  private save(change: (kept: KeptContents) => void): Promise<void> {
    const done = this.saving.then(async () => {
      const next: KeptContents = new Map(this.kept);
      change(next);
      await writeClipboard(this.host.file, next);
      this.kept = next;
    });
    this.saving = done.catch(() => {});
    return done;
  }

  private open(): void {
    clearTimeout(this.again);
    const socket = connect(this.host.socket);
    const reader = new VdAgentReader((type) => this.limitOf(type));
    this.socket = socket;
    // The guest may have let go of what it was told, when it saw that whoever was here before had gone.
    this.late = setTimeout(() => this.drop('its agent does not answer'), this.answerMs).unref();
    socket.once('connect', () => this.write(VDAGENT.capabilities, vdAgentNumbers(1, OURS)));
    socket.on('data', (bytes: Buffer) => {
      try {
        for (const message of reader.take(bytes)) if (this.socket === socket) this.take(message);
      } catch (error) {
        this.drop(messageOf(error));
      }
    });
    socket.on('error', () => {});
    socket.once('close', () => {
      if (this.socket === socket) this.drop('the connection is closed');
    });
  }

  /** And makes the next connection. */
  private drop(problem: string): void {
    const { socket, asked } = this;
    this.socket = undefined;
    this.capabilities = undefined;
    this.offered.clear();
    this.asked = undefined;
    clearTimeout(this.late);
    socket?.destroy();
    asked?.reject(this.refuse(problem));
    if (this.isClosed) return;
    clearTimeout(this.again);
    const pause = Math.min(MOST_AGAIN_MS, (this.host.againMs ?? AGAIN_MS) * 2 ** this.drops++);
    this.again = setTimeout(() => this.open(), pause).unref();
  }

  private limitOf(type: number): number {
    switch (type) {
      case VDAGENT.clipboard:
        return this.asked === undefined
          ? 0
          : MOST_CLIPBOARD_BYTES + (this.has('selection') ? PREFIX_BYTES : 0) + TYPE_BYTES;
      case VDAGENT.capabilities:
      case VDAGENT.grab:
      case VDAGENT.request:
      case VDAGENT.release:
        return MAX_NOTICE_BYTES;
      default:
        return 0;
    }
  }

  private take({ type, sizeBytes, body }: VdAgentMessage): void {
    const prefix = this.has('selection') ? PREFIX_BYTES : 0;
    if (body === undefined) {
      if (type !== VDAGENT.clipboard) throw new Error(`a message of type ${type} of ${sizeBytes} bytes`);
      const contentBytes = sizeBytes - prefix - TYPE_BYTES;
      this.asked?.reject(this.refuse(`it has ${contentBytes} bytes, more than ${MOST_CLIPBOARD_BYTES}`));
      return;
    }
    if (type === VDAGENT.capabilities) {
      if (body.length < 4) throw new Error('capabilities that are cut off');
      this.begin(body.readUInt32LE(0) !== 0, body.length < 8 ? 0 : body.readUInt32LE(4));
      return;
    }
    if (body.length < prefix) throw new Error('a message without a selection');
    const selection = SELECTIONS[prefix === 0 ? 0 : body.readUInt8(0)];
    // Others of X11 are nobody's business here.
    if (selection === undefined) return;
    const rest = body.subarray(prefix);
    if (type === VDAGENT.grab) this.note(selection, rest);
    else if (type === VDAGENT.release) this.offered.delete(selection);
    else if (rest.length < TYPE_BYTES) throw new Error('a message without a type');
    else if (type === VDAGENT.request) this.answer(selection, rest.readUInt32LE(0));
    else this.receive(selection, rest.readUInt32LE(0), rest.subarray(TYPE_BYTES));
  }

  /** The agent begins anew: what was offered before is forgotten at its side too. */
  private begin(isQuestion: boolean, capabilities: number): void {
    this.capabilities = capabilities;
    this.drops = 0;
    clearTimeout(this.late);
    this.offered.clear();
    if (isQuestion) this.write(VDAGENT.capabilities, vdAgentNumbers(0, OURS));
    for (const [selection, { type, isGuests }] of this.kept) {
      const isThere = selection === 'clipboard' || this.has('selection');
      if (!isGuests && isThere) this.send(VDAGENT.grab, selection, vdAgentNumbers(typeNumber(type)));
    }
    for (const wake of this.whenReady) wake();
  }

  /** The guest offers. */
  private note(selection: Selection, types: Buffer): void {
    const offered: ClipboardType[] = [];
    for (const type of CLIPBOARD_TYPES) {
      for (let at = 0; at + 4 <= types.length; at += 4) {
        if (types.readUInt32LE(at) === typeNumber(type) && !offered.includes(type)) offered.push(type);
      }
    }
    this.offered.set(selection, offered);
    if (!this.kept.has(selection)) return;
    this.kept.delete(selection);
    // A full disk: a service that comes later would offer it once more.
    this.save((kept) => kept.delete(selection)).catch(() => {});
  }

  /** The guest asks. */
  private answer(selection: Selection, type: number): void {
    const kept = this.offered.has(selection) ? undefined : this.kept.get(selection);
    if (kept === undefined || typeNumber(kept.type) !== type) {
      this.send(VDAGENT.clipboard, selection, vdAgentNumbers(NONE));
      return;
    }
    const { bytes } = kept;
    const isText = kept.type === 'text/plain' && this.has('carriageReturns');
    const content = isText ? Buffer.from(bytes.toString('utf8').replaceAll('\n', '\r\n')) : bytes;
    this.send(VDAGENT.clipboard, selection, Buffer.concat([vdAgentNumbers(type), content]));
  }

  /** The guest answers. */
  private receive(selection: Selection, type: number, bytes: Buffer): void {
    const { asked } = this;
    if (asked?.selection !== selection) return;
    if (type === typeNumber(asked.type)) asked.resolve(bytes);
    else if (type === NONE) asked.reject(this.refuse(`it gives nothing of ${asked.type}`));
  }

  private send(type: number, selection: Selection, rest: Buffer = Buffer.alloc(0)): void {
    const prefix = this.has('selection') ? [vdAgentNumbers(SELECTIONS.indexOf(selection))] : [];
    this.write(type, Buffer.concat([...prefix, rest]));
  }

  private write(type: number, body: Buffer): void {
    if (this.socket === undefined) return;
    // Whoever asks and does not read.
    if (this.socket.writableLength > MAX_UNREAD_BYTES) this.drop('its agent does not read');
    else this.socket.write(vdAgentMessage(type, body));
  }
}

function textOf(bytes: Buffer, hasCarriageReturns: boolean): Buffer {
  const text = bytes.toString('utf8');
  return Buffer.from(hasCarriageReturns ? text.replaceAll('\r\n', '\n') : text);
}
