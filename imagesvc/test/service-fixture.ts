/** The image service on a loopback port, in this process, over a store in a temporary folder. */
import { mkdirSync, mkdtempSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { pino } from 'pino';
import { request } from 'undici';
import type { Progress } from '#base';
import { createImageService, type ImageService, type ImageServiceOptions } from '../server/app.ts';
import { parseEvents, type ServerEvent } from '../server/client.ts';
import type { Job, JobResult, JobView } from '../server/jobs/job.ts';
import type { JobRunner } from '../server/jobs/job-queue.ts';
import { listen } from '../server/listen.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';

export interface Answer {
  readonly status: number;
  readonly headers: Record<string, string | string[] | undefined>;
  readonly bytes: Buffer;
  readonly text: string;
  // biome-ignore lint/suspicious/noExplicitAny: tests look into answers of many shapes
  readonly json: any;
}

export interface Ask {
  readonly method?: string;
  readonly body?: unknown;
  readonly raw?: string | Buffer;
  readonly headers?: Record<string, string>;
  readonly token?: string;
}

export class ServiceFixture {
  readonly root: string;
  readonly store: BlobStore;
  service!: ImageService;
  url = '';
  #options: Partial<ImageServiceOptions> = {};

  private constructor(root: string, store: BlobStore) {
    this.root = root;
    this.store = store;
  }

  static async start(options: Partial<ImageServiceOptions> = {}): Promise<ServiceFixture> {
    const root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-service-')));
    const fixture = new ServiceFixture(root, await openStore(`file://${root}/store`));
    await fixture.open(options);
    return fixture;
  }

  async open(options: Partial<ImageServiceOptions> = {}): Promise<void> {
    this.#options = { ...this.#options, ...options };
    this.service = await createImageService({
      store: this.store,
      stateDir: join(this.root, 'state'),
      version: '0.0.0',
      logger: pino({ level: 'silent' }),
      allowedPaths: [this.root],
      folders: { runDir: join(this.root, 'run'), cacheDir: join(this.root, 'cache') },
      ...this.#options,
    });
    this.url = await listen(this.service.app, { kind: 'tcp', host: '127.0.0.1', port: 0, loopback: true });
  }

  async stop(): Promise<void> {
    await this.service.close(0);
    rmSync(this.root, { recursive: true, force: true });
  }

  tree(name: string, files: Readonly<Record<string, string | Buffer>>): string {
    const folder = join(this.root, name);
    for (const [path, content] of Object.entries(files)) {
      const at = join(folder, path);
      mkdirSync(join(at, '..'), { recursive: true });
      writeFileSync(at, content);
    }
    return folder;
  }

  async ask(path: string, { method = 'GET', body, raw, headers = {}, token }: Ask = {}): Promise<Answer> {
    const all: Record<string, string> = { ...headers };
    if (token !== undefined) all.authorization = `Bearer ${token}`;
    if (body !== undefined) all['content-type'] ??= 'application/json';
    const answer = await request(`${this.url}${path}`, {
      method: method as 'GET',
      headers: all,
      body: raw ?? (body === undefined ? undefined : JSON.stringify(body)),
    });
    const bytes = Buffer.from(await answer.body.arrayBuffer());
    const text = bytes.toString();
    let json: unknown;
    try {
      json = JSON.parse(text);
    } catch {
      // Not all answers are.
    }
    return { status: answer.statusCode, headers: answer.headers, bytes, text, json };
  }

  /** Events of a job, until `enough` or the end of the stream. */
  async events(
    id: string,
    lastId?: string,
    enough: (event: ServerEvent) => boolean = () => false,
  ): Promise<ServerEvent[]> {
    const stop = new AbortController();
    const headers: Record<string, string> = lastId === undefined ? {} : { 'last-event-id': lastId };
    const answer = await request(`${this.url}/v1/jobs/${id}/events`, { headers, signal: stop.signal });
    const got: ServerEvent[] = [];
    try {
      for await (const event of parseEvents(answer.body)) {
        got.push(event);
        if (enough(event)) break;
      }
    } finally {
      answer.body.on('error', () => {});
      stop.abort();
    }
    return got;
  }

  async ended(id: string): Promise<JobView> {
    await this.events(id);
    return this.service.queue.get(id);
  }
}

export const noResult: JobResult = {
  name: 'web:1',
  digest: `sha256:${'0'.repeat(64)}`,
  kind: 'base',
  layers: 1,
  metaBytes: 1,
  dataBytes: 2,
  sizeBytes: 3,
  reused: false,
  notes: [],
};

/** Jobs that end when the test says so. */
export class HandRunner implements JobRunner {
  readonly started: string[] = [];
  holds = false;
  readonly #jobs = new Map<
    string,
    { progress: Progress; done: (result: JobResult) => void; failed: (error: unknown) => void }
  >();

  run(job: Job, { progress, signal }: { progress: Progress; signal: AbortSignal }): Promise<JobResult> {
    this.started.push(job.id);
    return new Promise((done, failed) => {
      this.#jobs.set(job.id, { progress, done, failed });
      signal.addEventListener('abort', () => failed(signal.reason), { once: true });
    });
  }

  async stillHolds(): Promise<boolean> {
    return this.holds;
  }

  async job(id: string) {
    for (;;) {
      const found = this.#jobs.get(id);
      if (found !== undefined) return found;
      await new Promise((resolve) => setTimeout(resolve, 5));
    }
  }

  async finish(id: string): Promise<void> {
    const job = await this.job(id);
    this.#jobs.delete(id);
    job.done(noResult);
  }

  async fail(id: string, error: unknown): Promise<void> {
    const job = await this.job(id);
    this.#jobs.delete(id);
    job.failed(error);
  }
}
