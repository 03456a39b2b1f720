/** Files of a sandbox. Paths are the sandbox's, absolute or from its root; no link leads out of it. */
import type { Buffer } from 'node:buffer';
import { type ErrorFacts, errorFrom, protocolError } from './errors.ts';
import { downloadTree, type TreeOptions, uploadTree } from './file-trees.ts';
import { BackOff, bodyOf, type CallOptions, drain, type Transport } from './transport.ts';

export interface FileStatus {
  readonly kind: 'file' | 'directory' | 'symlink' | 'other';
  /** With the bits of the kind. */
  readonly mode: number;
  readonly uid: number;
  readonly gid: number;
  readonly links: number;
  readonly size: number;
  readonly blocks: number;
  readonly inode: string;
  readonly modifiedMs: number;
}

export interface FileEntry extends FileStatus {
  readonly name: string;
  /** Where the name is no UTF-8. */
  readonly nameBase64?: string;
}

/** `made`, `changed`, `written`, `removed`, `moved-from`, `moved-to`, `attributes`, `overflow`, `gone`. */
export interface FileEvent {
  readonly event: string;
  /** Below what is watched; empty: that itself. */
  readonly path: string;
  readonly pathBase64?: string;
  readonly directory: boolean;
  readonly cookie?: number;
}

export class SandboxFiles {
  private readonly transport: Transport;
  /** @internal */
  readonly path: string;

  constructor(transport: Transport, sandboxPath: string) {
    this.transport = transport;
    this.path = `${sandboxPath}/files`;
  }

  /** Of a link itself. @throws FileError, SandboxGone; as all below */
  async stat(path: string, options: CallOptions = {}): Promise<FileStatus> {
    return this.transport.json('GET', `${this.path}/stat`, { ...options, query: { path } });
  }

  async list(path: string, options: CallOptions = {}): Promise<FileEntry[]> {
    return this.transport.json('GET', `${this.path}/list`, { ...options, query: { path } });
  }

  /** The whole of it, in memory. */
  async read(path: string, options: CallOptions = {}): Promise<Buffer> {
    return this.transport.call('GET', this.path, { ...options, query: { path } }, drain);
  }

  async readText(path: string, options: CallOptions = {}): Promise<string> {
    return (await this.read(path, options)).toString('utf8');
  }

  /** As it comes, over connections that break. A file that is replaced meanwhile is a FileChanged. */
  async *readStream(
    path: string,
    { offset = 0, signal }: { readonly offset?: number; readonly signal?: AbortSignal } = {},
  ): AsyncGenerator<Buffer> {
    const backOff = new BackOff(this.transport.patienceMs);
    let at = offset;
    let tag: unknown;
    for (;;) {
      try {
        const answer = await this.transport.once('GET', this.path, { query: { path, offset: at }, signal });
        tag ??= answer.headers.etag;
        if (answer.headers.etag !== tag) {
          answer.destroy();
          throw errorFrom({ code: 'FILE_CHANGED', message: `${path} was changed while it was read`, retryable: true });
        }
        for await (const bytes of bodyOf(answer, signal)) {
          backOff.progress();
          at += bytes.length;
          yield bytes;
        }
        return;
      } catch (error) {
        await backOff.after(error, signal);
      }
    }
  }

  /** In place of what is there: all of it, or nothing. What comes from an iterable cannot be sent again when the connection breaks: for large files, `upload`. */
  async write(
    path: string,
    content: string | Uint8Array | AsyncIterable<Uint8Array>,
    { mode, ...options }: CallOptions & { readonly mode?: number } = {},
  ): Promise<FileStatus> {
    const query = { path, mode };
    if (typeof content === 'string' || content instanceof Uint8Array) {
      const bytes = typeof content === 'string' ? new TextEncoder().encode(content) : content;
      return this.transport.json('PUT', this.path, { ...options, query, bytes });
    }
    const answer = await this.transport.once('PUT', this.path, { ...options, query, bytes: content });
    return JSON.parse((await drain(answer)).toString()) as FileStatus;
  }

  /** `parents`: those that are missing too, and no error when it is there. */
  async mkdir(
    path: string,
    { parents, mode, ...options }: CallOptions & { readonly parents?: boolean; readonly mode?: number } = {},
  ): Promise<void> {
    await this.transport.json('POST', `${this.path}/mkdir`, { ...options, query: { path, recursive: parents, mode } });
  }

  async remove(
    path: string,
    { recursive, ...options }: CallOptions & { readonly recursive?: boolean } = {},
  ): Promise<void> {
    await this.transport.json('DELETE', this.path, { ...options, query: { path, recursive } });
  }

  async rename(from: string, to: string, options: CallOptions = {}): Promise<void> {
    await this.transport.json('POST', `${this.path}/rename`, { ...options, body: { from, to } });
  }

  async symlink(target: string, path: string, options: CallOptions = {}): Promise<void> {
    await this.transport.json('POST', `${this.path}/symlink`, { ...options, body: { from: target, to: path } });
  }

  async readlink(path: string, options: CallOptions = {}): Promise<string> {
    const { target } = await this.transport.json<{ target: string }>('GET', `${this.path}/link`, {
      ...options,
      query: { path },
    });
    return target;
  }

  /** sha256, in hexadecimal digits. */
  async digest(path: string, options: CallOptions = {}): Promise<string> {
    const { sha256 } = await this.transport.json<{ sha256: string }>('GET', `${this.path}/digest`, {
      ...options,
      query: { path },
    });
    return sha256;
  }

  /** Events as they come. Resolves when all from now on will be told; ends when the iteration or the signal does. */
  async watch(
    path: string,
    { recursive, signal }: { readonly recursive?: boolean; readonly signal?: AbortSignal } = {},
  ): Promise<AsyncGenerator<FileEvent>> {
    const lines = this.watchLines(path, recursive, signal);
    const first = await lines.next();
    if (first.done === true || first.value.event !== 'watching') throw protocolError('a watch that does not begin');
    return lines;
  }

  /** A file, link or folder of this machine, to `to`, which it is then. Large files go on where they were when the connection breaks, and in another run too. */
  async upload(from: string, to: string, options: TreeOptions = {}): Promise<void> {
    await uploadTree(this.transport, this, from, to, options);
  }

  /** And back. Owners are whoever calls. */
  async download(from: string, to: string, options: TreeOptions = {}): Promise<void> {
    await downloadTree(this, from, to, options);
  }

  private async *watchLines(path: string, recursive?: boolean, signal?: AbortSignal): AsyncGenerator<FileEvent> {
    const query = { path, recursive };
    const answer = await this.transport.retrying(
      () => this.transport.once('GET', `${this.path}/watch`, { query, signal }),
      { signal },
    );
    const decoder = new TextDecoder();
    let rest = '';
    for await (const bytes of bodyOf(answer, signal)) {
      const lines = (rest + decoder.decode(bytes, { stream: true })).split('\n');
      rest = lines.pop()!;
      for (const line of lines) {
        if (line === '') continue;
        const news = JSON.parse(line) as FileEvent & { readonly error?: ErrorFacts };
        if (news.error !== undefined) throw errorFrom(news.error);
        yield news;
      }
    }
  }
}
