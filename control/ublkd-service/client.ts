/**
 * The block service as commands use it: asked over its socket, started in the background where none runs.
 *
 * Its errors arrive as what they were there, code and exit status included.
 */
import { spawn } from 'node:child_process';
import { closeSync, mkdirSync, openSync, readFileSync, realpathSync, rmSync } from 'node:fs';
import { type IncomingMessage, request } from 'node:http';
import { connect } from 'node:net';
import { dirname, join, resolve } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { DsecError, type ErrorRow, isDsecError, messageOf } from '#base';
import { imagesvcErrors } from '#imagesvc';
import { linuxErrors, lock, withLock } from '#linux';
import { type Compacted, type DiskView, disksFolder, ublkDaemonErrors } from '#ublk-daemon';
import { projectRoot } from '../cli/version.ts';
import { controlErrors, fail } from '../errors.ts';
import { type ServiceFolders, serviceFolders } from './folders.ts';
import type { AttachRequest, PackRequest } from './schemas.ts';

/** A service that was started for a command ends when nothing has been attached for so long. */
const IDLE = '5m';
/** Taking over the devices of one that died may take its time. */
const START_MS = 180_000;
const ENDING_MS = 30_000;

export interface PackedDisk {
  readonly uuid: string;
  readonly path: string;
  readonly sizeBytes: number;
  readonly segments: number;
}

export class DiskServiceClient {
  readonly socket: string;
  readonly #signal: AbortSignal | undefined;

  constructor(socket: string, signal?: AbortSignal) {
    this.socket = socket;
    this.#signal = signal;
  }

  list(): Promise<{ disksFolder: string; disks: DiskView[] }> {
    return this.#ask('GET', '/v1/disks');
  }

  attach(wish: AttachRequest): Promise<DiskView> {
    return this.#ask('POST', '/v1/disks', wish);
  }

  detach(name: string, force: boolean): Promise<{ name: string; state: 'detached' | 'detaching' }> {
    return this.#ask('DELETE', `${pathOf(name)}?force=${force}`);
  }

  snapshot(name: string, snapshot: string): Promise<{ uuid: string; layer: string }> {
    return this.#ask('POST', `${pathOf(name)}/snapshot`, { snapshot });
  }

  compact(name: string): Promise<Compacted> {
    return this.#ask('POST', `${pathOf(name)}/compact`);
  }

  /** Only larger. `told`: its users see it now. */
  resize(name: string, sizeBytes: number): Promise<{ sizeBytes: number; told: boolean }> {
    return this.#ask('POST', `${pathOf(name)}/resize`, { sizeBytes });
  }

  packDiff(name: string, wish: PackRequest): Promise<PackedDisk> {
    return this.#ask('POST', `${pathOf(name)}/pack-diff`, { ...wish, output: resolve(wish.output) });
  }

  exportTo(name: string, format: 'raw' | 'qcow2', output: string): Promise<{ sizeBytes: number }> {
    return this.#ask('POST', `${pathOf(name)}/export`, { format, output: resolve(output) });
  }

  async #ask<T>(method: string, path: string, body?: unknown): Promise<T> {
    const { status, text } = await this.#send(method, path, body === undefined ? undefined : JSON.stringify(body));
    let answer: unknown;
    try {
      answer = JSON.parse(text);
    } catch (error) {
      throw fail('UBLKD_PROTOCOL', { socket: this.socket, why: `status ${status}, no JSON` }, error);
    }
    if (status < 300) return answer as T;
    throw errorOf(answer) ?? fail('UBLKD_PROTOCOL', { socket: this.socket, why: `it answers with status ${status}` });
  }

  #send(method: string, path: string, body?: string): Promise<{ status: number; text: string }> {
    return new Promise((done, failed) => {
      const refuse = (error: Error) => {
        if (this.#signal?.aborted) failed(this.#signal.reason);
        else failed(fail('UBLKD_UNREACHABLE', { socket: this.socket, reason: messageOf(error) }, error));
      };
      const headers =
        body === undefined ? {} : { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) };
      const options = { socketPath: this.socket, path, method, headers, signal: this.#signal, agent: false };
      const asked = request(options, (answer: IncomingMessage) => {
        let text = '';
        answer.setEncoding('utf8').on('data', (piece: string) => {
          text += piece;
        });
        answer.once('error', refuse);
        answer.once('end', () => done({ status: answer.statusCode ?? 0, text }));
      });
      asked.once('error', refuse);
      asked.end(body);
    });
  }
}

function pathOf(name: string): string {
  return `/v1/disks/${encodeURIComponent(name)}`;
}

const ROWS: Readonly<Record<string, ErrorRow>> = {
  ...linuxErrors,
  ...imagesvcErrors,
  ...ublkDaemonErrors,
  ...controlErrors,
};

/** The error that the service tells of, as if it had been thrown here. Texts are filled in already. */
function errorOf(answer: unknown): DsecError | undefined {
  const { code, message, hint, retryable } =
    (answer as { error?: { code?: unknown; message?: unknown; hint?: string; retryable?: boolean } }).error ?? {};
  if (typeof code !== 'string' || typeof message !== 'string') return undefined;
  const row = ROWS[code];
  return new DsecError(code, { message, hint, retryable, exit: row?.exit ?? 6, http: row?.http ?? 502 });
}

/** The service, where one listens. */
export async function findService(signal?: AbortSignal): Promise<DiskServiceClient | undefined> {
  const { socket } = serviceFolders();
  return (await isListening(socket)) ? new DiskServiceClient(socket, signal) : undefined;
}

/** The service that has the disk of this name attached, in any state. */
export async function serviceOf(
  name: string,
  disksFolder: string,
  signal?: AbortSignal,
): Promise<{ client: DiskServiceClient; disk: DiskView } | undefined> {
  const client = await findService(signal);
  const listed = await client?.list();
  // One of another state folder has other disks by the same names.
  if (client === undefined || listed === undefined || !isSameFolder(listed.disksFolder, disksFolder)) return undefined;
  const disk = listed.disks.find((one) => one.kind === 'disk' && one.name === name);
  return disk === undefined ? undefined : { client, disk };
}

/** Attaches by the service, which is started where none runs; one that is just ending is followed by another. */
export async function attachDisk(wish: AttachRequest, signal?: AbortSignal): Promise<DiskView> {
  for (let tries = 1; ; tries++) {
    try {
      const service = await ensureService(signal);
      if (wish.disk !== undefined) await refuseOtherDisks(service);
      return await service.attach(wish);
    } catch (error) {
      const isEnding = isDsecError(error) && ['UBLKD_ENDING', 'UBLKD_UNREACHABLE'].includes(error.code);
      if (!isEnding || tries === 3) throw error;
      await delay(100, undefined, { signal });
    }
  }
}

/** Names of disks mean those of its folder. @throws UBLKD_OTHER_DISKS */
export async function refuseOtherDisks(service: DiskServiceClient): Promise<void> {
  const ours = disksFolder();
  const { disksFolder: theirs } = await service.list();
  if (!isSameFolder(theirs, ours)) throw fail('UBLKD_OTHER_DISKS', { socket: service.socket, theirs, ours });
}

export function isSameFolder(one: string, other: string): boolean {
  if (one === other) return true;
  try {
    return realpathSync(one) === realpathSync(other);
  } catch {
    return false;
  }
}

/** The service; started in the background where none runs. @throws UBLKD_START */
async function ensureService(signal?: AbortSignal): Promise<DiskServiceClient> {
  const folders = serviceFolders();
  const { socket } = folders;
  if (!(await isListening(socket))) {
    try {
      mkdirSync(dirname(socket), { recursive: true, mode: 0o755 });
    } catch (error) {
      throw fail('UBLKD_START', { problem: messageOf(error) }, error);
    }
    // Two commands at once start one.
    await withLock(
      `${socket}.start`,
      async () => {
        if (!(await isListening(socket))) await start(folders, signal);
        // While it is held; whoever waits for it looks again.
        rmSync(`${socket}.start`, { force: true });
      },
      { timeoutMs: START_MS, signal },
    );
  }
  return new DiskServiceClient(socket, signal);
}

async function start({ socket, stateDir }: ServiceFolders, signal?: AbortSignal): Promise<void> {
  // One that is ending has its disks until it is gone.
  const held = await lock(join(stateDir, 'lock'), { timeoutMs: ENDING_MS, signal }).catch((error: unknown) => {
    if (!isDsecError(error, 'LINUX_LOCK_TIMEOUT')) throw error;
    const problem = `another one has ${stateDir}, and is not at ${socket}: use its $DSEC_RUN, or end it`;
    throw fail('UBLKD_START', { problem }, error);
  });
  held.release();
  const logPath = `${socket.replace(/\.sock$/, '')}.log`;
  const log = openSync(logPath, 'w', 0o600);
  const env: NodeJS.ProcessEnv = { ...process.env };
  for (const name of ['DSEC_STATE', 'DSEC_RUN', 'DSEC_CACHE']) if (env[name]) env[name] = resolve(env[name]);
  const program = [join(projectRoot(), 'bin/dsec'), 'serve', 'ublkd', '--idle', IDLE, '--log-level', 'warn'];
  const child = spawn(process.execPath, program, { cwd: '/', env, detached: true, stdio: ['ignore', 'ignore', log] });
  closeSync(log);
  let ended = false;
  child.once('exit', () => {
    ended = true;
  });
  child.once('error', () => {
    ended = true;
  });
  child.unref();
  for (const until = Date.now() + START_MS; !(await isListening(socket)); await delay(20, undefined, { signal })) {
    if (ended || Date.now() > until) {
      const said = readFileSync(logPath, 'utf8')
        .trim()
        .split('\n')
        .slice(-3)
        .join('\n')
        .replace(/^dsec: /, '');
      throw fail('UBLKD_START', { problem: said || 'it said nothing' });
    }
  }
}

function isListening(socket: string): Promise<boolean> {
  return new Promise((done) => {
    const tried = connect(socket);
    tried.once('connect', () => {
      tried.destroy();
      done(true);
    });
    tried.once('error', () => done(false));
  });
}
