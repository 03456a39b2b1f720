/**
 * The warm pool of a node: machines of a shape for which there is a template begin from it, and do not boot. A shape that was asked for twice gets one, made
 * beside all else; whoever needs a machine meanwhile has it booted. So does everybody for whom a template does not do what it should: one that is broken goes, and
 * so does one that fails again and again; the next one is made anew.
 */
import { isDsecError, messageOf } from '#base';
import { MICROVM } from '../vm-backend.ts';
import type { RunningVm, VmSpec } from '../vm-driver.ts';
import type { SandboxVmDriver } from '../vm-drivers.ts';
import { makeTemplate } from './make-template.ts';
import { noteUse, proveTemplate, readTemplate, removeTemplate, type Template } from './template-folder.ts';
import { lateSpec, shapeOf, type TemplateShape } from './template-shape.ts';
import { startWarm } from './warm-start.ts';

/** Of a shape, until it gets one. */
const ASKED_OFTEN = 2;
/** Shapes that are counted. */
const MOST_COUNTED = 1000;
/** One that cannot be made is not tried again and again. */
const MOST_FAILURES = 3;
/** Of a template, one after the other, for reasons that may as well be this host's: short of memory, or pressed hard. */
const MOST_DOUBTS = 3;
/** They say that it is the template. */
const BROKEN: ReadonlySet<string | undefined> = new Set(['VM_SNAPSHOT_DAMAGED', 'VM_TEMPLATE']);

export interface WarmPoolOptions {
  readonly stateDir: string;
  readonly runDir: string;
  readonly onNote?: (text: string) => void;
}

export class WarmPool {
  private readonly options: WarmPoolOptions;
  private readonly asked = new Map<string, number>();
  private readonly failures = new Map<string, number>();
  private readonly making = new Map<string, Promise<unknown>>();
  /** Snapshots of templates that machines were made of, by key. */
  private readonly held = new Map<string, string>();
  /** By snapshot, as are the next two. */
  private readonly doubts = new Map<string, number>();
  /** Starts under way: the machine's process opens what the driver keeps of it, at a moment that we do not know. */
  private readonly starting = new Map<string, number>();
  /** Of templates that have gone: to be forgotten when no start is under way. */
  private readonly leaving = new Set<string>();
  private readonly over = new AbortController();

  constructor(options: WarmPoolOptions) {
    this.options = options;
  }

  /**
   * The machine of this spec out of a template; undefined: there is none, or it was of no use, and it is to be booted.
   * @param modules What a template's guest is to have loaded.
   */
  async start(driver: SandboxVmDriver, asked: VmSpec, modules: readonly string[]): Promise<RunningVm | undefined> {
    const { stateDir, onNote } = this.options;
    const spec = lateSpec(asked);
    try {
      const shape = shapeOf(spec, driver);
      const template = readTemplate(stateDir, shape.key);
      this.hold(driver, shape.key, template);
      if (template === undefined) {
        this.count(driver, shape, spec, modules);
        return undefined;
      }
      const { snapshotFolder } = template;
      this.starting.set(snapshotFolder, (this.starting.get(snapshotFolder) ?? 0) + 1);
      try {
        await proveTemplate(template);
        const vm = await startWarm(driver, spec, template);
        noteUse(template);
        this.failures.delete(shape.key);
        this.doubts.delete(snapshotFolder);
        return vm;
      } catch (error) {
        this.noteFailure(driver, template, error);
        throw error;
      } finally {
        this.noteStarted(driver, snapshotFolder);
      }
    } catch (error) {
      onNote?.(`${MICROVM} ${spec.id} is booted, for its template is of no use: ${messageOf(error)}`);
      return undefined;
    }
  }

  /** Resolves when none is being made. */
  async made(): Promise<void> {
    while (this.making.size > 0) await Promise.all(this.making.values());
  }

  /** Whoever is making one gives it up. */
  async close(): Promise<void> {
    this.over.abort();
    await this.made();
  }

  /** Of a template that has gone nothing stays in memory, but where machines have it. */
  private hold(driver: SandboxVmDriver, key: string, template: Template | undefined): void {
    const before = this.held.get(key);
    if (before !== undefined && before !== template?.snapshotFolder) this.forget(driver, before);
    if (template === undefined) this.held.delete(key);
    else this.held.set(key, template.snapshotFolder);
  }

  private forget(driver: SandboxVmDriver, snapshot: string): void {
    this.doubts.delete(snapshot);
    if (this.starting.has(snapshot)) this.leaving.add(snapshot);
    else driver.forgetSnapshot(snapshot);
  }

  private noteStarted(driver: SandboxVmDriver, snapshot: string): void {
    const others = this.starting.get(snapshot)! - 1;
    if (others > 0) {
      this.starting.set(snapshot, others);
      return;
    }
    this.starting.delete(snapshot);
    if (this.leaving.delete(snapshot)) driver.forgetSnapshot(snapshot);
  }

  private noteFailure(driver: SandboxVmDriver, { key, snapshotFolder }: Template, error: unknown): void {
    const code = isDsecError(error) ? error.code : undefined;
    // Of this one machine.
    if (code === 'VM_SPEC') return;
    const { stateDir } = this.options;
    const present = readTemplate(stateDir, key);
    if (present?.snapshotFolder !== snapshotFolder) {
      // It has gone, and another one may have its place by now.
      this.hold(driver, key, present);
      return;
    }
    const doubts = (this.doubts.get(snapshotFolder) ?? 0) + 1;
    this.doubts.set(snapshotFolder, doubts);
    if (!BROKEN.has(code) && doubts < MOST_DOUBTS) return;
    this.failures.set(key, (this.failures.get(key) ?? 0) + 1);
    removeTemplate(stateDir, key);
    this.hold(driver, key, undefined);
  }

  private count(driver: SandboxVmDriver, shape: TemplateShape, spec: VmSpec, modules: readonly string[]): void {
    const { key } = shape;
    const asked = (this.asked.get(key) ?? 0) + 1;
    if (this.asked.size >= MOST_COUNTED) this.asked.clear();
    this.asked.set(key, asked);
    const failed = (this.failures.get(key) ?? 0) >= MOST_FAILURES;
    if (asked < ASKED_OFTEN || failed || this.making.has(key) || this.over.signal.aborted) return;
    const { onNote } = this.options;
    const { signal } = this.over;
    const made = makeTemplate({ ...this.options, driver, spec, modules, shape, serviceClass: 'be', signal });
    const noted = made
      .then(() => {
        // Older ones may have gone for it.
        for (const one of this.held.keys()) this.hold(driver, one, readTemplate(this.options.stateDir, one));
      })
      .catch((error) => {
        if (signal.aborted) return;
        this.failures.set(key, (this.failures.get(key) ?? 0) + 1);
        onNote?.(
          `no template for virtual machines of ${spec.cpus} processors, ${spec.memoryBytes} bytes: ${messageOf(error)}`,
        );
      })
      .finally(() => this.making.delete(key));
    this.making.set(key, noted);
  }
}
