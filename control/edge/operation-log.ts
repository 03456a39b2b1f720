/**
 * What became of operations on sandboxes that carry an id of their client's: repeated, one is not carried out again. A file an operation, written before
 * it is carried out and again with its answer, so that it holds over a restart of the edge:
 *
 *     <folder>/<sandbox name>/<sha256 of the operation id, 32 digits>
 *
 * Bounded for each sandbox in number and in bytes: the oldest go. Nothing is synced: what a crash of the machine takes, it takes with the sandbox.
 */
import { createHash } from 'node:crypto';
import { mkdirSync, readdirSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

export interface OperationAnswer {
  readonly status: number;
  readonly contentType?: string;
  readonly body: Buffer;
}

/** What is to be repeated: method and path, and the digest of its body. */
export interface OperationPrint {
  readonly target: string;
  readonly bodyDigest: string;
}

interface OperationRecord extends OperationPrint {
  readonly operation: string;
  /** The one of that name that it was for: another one may have the name later. */
  readonly sandbox: string | undefined;
  readonly status?: number;
  readonly contentType?: string;
  readonly bodyBase64?: string;
  /** It was carried out, and its answer is too large to be kept. */
  readonly large?: true;
}

export interface OperationLimits {
  readonly count: number;
  readonly bytes: number;
}

export interface RunningOperation {
  /** Undefined: as if it had never been asked for, so that it can be asked for again. */
  end(answer: OperationAnswer | undefined): void;
}

export type OperationBegin =
  | { readonly answer: OperationAnswer; readonly running?: undefined }
  | { readonly running: RunningOperation; readonly answer?: undefined };

export const OPERATION_BODY_BYTES = 1 << 20;
const DEFAULT_LIMITS: OperationLimits = { count: 1000, bytes: 64 << 20 };

interface Kept {
  readonly files: Map<string, number>;
  bytes: number;
}

export class OperationLog {
  private readonly folder: string;
  private readonly limits: OperationLimits;
  private readonly running = new Map<string, Promise<void>>();
  /** By sandbox name: its files with their sizes, oldest first. */
  private readonly kept = new Map<string, Kept>();

  constructor(folder: string, limits: OperationLimits = DEFAULT_LIMITS) {
    this.folder = folder;
    this.limits = limits;
  }

  /**
   * One that runs already is waited for. `again`: may be carried out a second time when the edge ended in the middle of the first.
   * @throws OPERATION_MISMATCH, OPERATION_UNKNOWN, OPERATION_NOT_KEPT
   */
  async begin(
    name: string,
    sandbox: string | undefined,
    operation: string,
    print: OperationPrint,
    again: boolean,
  ): Promise<OperationBegin> {
    const file = createHash('sha256').update(operation).digest('hex').slice(0, 32);
    const key = `${name}/${file}`;
    for (let before = this.running.get(key); before !== undefined; before = this.running.get(key)) await before;
    const found = this.read(name, file);
    // Of one that had this name before: when none has it now, it is asked for what became of that.
    const record = found !== undefined && (sandbox === undefined || found.sandbox === sandbox) ? found : undefined;
    if (record !== undefined) {
      for (const what of ['target', 'bodyDigest'] as const) {
        if (record[what] === print[what]) continue;
        const differs = what === 'target' ? 'method or path' : 'the body';
        throw fail('OPERATION_MISMATCH', { operation, name, what: differs });
      }
      if (record.large) {
        const what = 'was carried out; its answer was too large to be kept';
        throw fail('OPERATION_UNKNOWN', { operation, name, what });
      }
      const { status, contentType, bodyBase64 = '' } = record;
      if (status !== undefined) return { answer: { status, contentType, body: Buffer.from(bodyBase64, 'base64') } };
      if (!again) {
        const what = 'the edge ended before it was done: what came of it is not known';
        throw fail('OPERATION_UNKNOWN', { operation, name, what });
      }
    }
    const begun: OperationRecord = { operation, sandbox, ...print };
    try {
      this.write(name, file, begun);
    } catch (error) {
      throw fail('OPERATION_NOT_KEPT', { operation, problem: messageOf(error) }, error);
    }
    let done!: () => void;
    this.running.set(
      key,
      new Promise((resolve) => {
        done = resolve;
      }),
    );
    let ended = false;
    const end = (answer: OperationAnswer | undefined) => {
      if (ended) return;
      ended = true;
      try {
        if (answer === undefined) this.remove(name, file);
        else this.write(name, file, { ...begun, ...answerFields(answer) });
      } catch {
        // Whoever asked has the answer; repeated, it is one of which nothing is known.
      }
      this.running.delete(key);
      done();
    };
    return { running: { end } };
  }

  /** Those of sandboxes that went before, `has` says which are there. */
  sweep(beforeMs: number, has: (name: string) => boolean): void {
    for (const name of entriesOf(this.folder)) {
      const path = join(this.folder, name);
      try {
        if (has(name) || statSync(path).mtimeMs > beforeMs) continue;
        rmSync(path, { recursive: true, force: true });
        this.kept.delete(name);
      } catch {
        // Another time.
      }
    }
  }

  private read(name: string, file: string): OperationRecord | undefined {
    try {
      return JSON.parse(readFileSync(join(this.folder, name, file), 'utf8')) as OperationRecord;
    } catch (error) {
      if (systemCode(error) === 'ENOENT') return undefined;
      // Half of it, by a crash of the machine.
      if (error instanceof SyntaxError) return undefined;
      throw error;
    }
  }

  private write(name: string, file: string, record: OperationRecord): void {
    const folder = join(this.folder, name);
    const kept = this.keptOf(name);
    const text = JSON.stringify(record);
    mkdirSync(folder, { recursive: true, mode: 0o700 });
    const fresh = join(folder, `${file}.tmp`);
    try {
      writeFileSync(fresh, text, { mode: 0o600 });
      renameSync(fresh, join(folder, file));
    } catch (error) {
      rmSync(fresh, { force: true });
      throw error;
    }
    kept.bytes += text.length - (kept.files.get(file) ?? 0);
    kept.files.delete(file);
    kept.files.set(file, text.length);
    for (const oldest of [...kept.files.keys()]) {
      if (kept.files.size <= this.limits.count && kept.bytes <= this.limits.bytes) break;
      if (oldest !== file && !this.running.has(`${name}/${oldest}`)) this.remove(name, oldest);
    }
  }

  private remove(name: string, file: string): void {
    rmSync(join(this.folder, name, file), { force: true });
    const kept = this.keptOf(name);
    kept.bytes -= kept.files.get(file) ?? 0;
    kept.files.delete(file);
  }

  private keptOf(name: string): Kept {
    const known = this.kept.get(name);
    if (known !== undefined) return known;
    const found: [string, number, number][] = [];
    for (const file of entriesOf(join(this.folder, name))) {
      const path = join(this.folder, name, file);
      if (file.endsWith('.tmp')) rmSync(path, { force: true });
      else {
        const { size, mtimeMs } = statSync(path);
        found.push([file, size, mtimeMs]);
      }
    }
    found.sort((a, b) => a[2] - b[2]);
    const kept = {
      files: new Map(found.map(([file, size]) => [file, size])),
      bytes: found.reduce((all, [, size]) => all + size, 0),
    };
    this.kept.set(name, kept);
    return kept;
  }
}

function answerFields({ status, contentType, body }: OperationAnswer): Partial<OperationRecord> {
  if (body.length > OPERATION_BODY_BYTES) return { large: true };
  return { status, contentType, bodyBase64: body.toString('base64') };
}

function entriesOf(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}
