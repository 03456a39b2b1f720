/**
 * Writes to an S3 bucket, through the SDK (which is loaded by the first of them). An object appears whole or not at all: small ones by
 * one PUT, large ones by a multipart upload, which nobody sees before it is completed and which is aborted when it fails. All
 * writes are idempotent, so the SDK's retries are safe. Bodies are buffers, signed with their sha256: what arrives is what was sent.
 */
import { type FileHandle, open } from 'node:fs/promises';
import { abortSignalOf, messageOf } from '#base';
import { fail } from '../errors.ts';
import { retryCall } from './decorators/retry-call.ts';
import { readFully } from './durable-file.ts';
import { loadSdk, type S3Access } from './s3-access.ts';
import { type Asked, sdkFailure } from './s3-refusal.ts';

/** Up to this an object is one PUT. */
const SINGLE_BYTES = 16 * 1024 * 1024;
const PART_BYTES = 16 * 1024 * 1024;
const MAX_PARTS = 10_000;
const PARTS_AT_ONCE = 4;
/** A request takes at most this, and a second for each SLOWEST_BYTES that it sends. */
const DEADLINE_MS = 120_000;
const SLOWEST_BYTES = 64 * 1024;

export interface S3WriterSizes {
  readonly singleBytes?: number;
  readonly partBytes?: number;
}

export class S3Writer {
  readonly #access: S3Access;
  readonly #singleBytes: number;
  readonly #partBytes: number;

  constructor(access: S3Access, { singleBytes = SINGLE_BYTES, partBytes = PART_BYTES }: S3WriterSizes = {}) {
    this.#access = access;
    this.#singleBytes = singleBytes;
    this.#partBytes = partBytes;
  }

  /** `sha256`: of the bytes; a server that knows it refuses other ones. */
  async put(key: string, bytes: Buffer, sha256?: Buffer): Promise<void> {
    if (bytes.length > this.#singleBytes) {
      await this.#multipart(key, bytes.length, async (offset, length) => bytes.subarray(offset, offset + length));
      return;
    }
    const { PutObjectCommand } = await loadSdk();
    await this.#ask(`write of ${key}`, bytes.length, async (abortSignal) => {
      const client = await this.#access.sdk();
      const checksum = sha256 === undefined ? {} : { ChecksumSHA256: sha256.toString('base64') };
      await client.send(new PutObjectCommand({ Bucket: this.#bucket, Key: key, Body: bytes, ...checksum }), {
        abortSignal,
      });
    });
  }

  /** The file must not change meanwhile. */
  async putFile(key: string, path: string, sizeBytes: number, sha256: Buffer): Promise<void> {
    const file = await open(path, 'r');
    try {
      if (sizeBytes <= this.#singleBytes) await this.put(key, await readPart(file, path, 0, sizeBytes), sha256);
      else await this.#multipart(key, sizeBytes, (offset, length) => readPart(file, path, offset, length));
    } finally {
      await file.close();
    }
  }

  /** None there is no error. */
  async delete(key: string): Promise<void> {
    const { DeleteObjectCommand } = await loadSdk();
    await this.#ask(`deletion of ${key}`, 0, async (abortSignal) => {
      const client = await this.#access.sdk();
      await client.send(new DeleteObjectCommand({ Bucket: this.#bucket, Key: key }), { abortSignal });
    });
  }

  /** Uploads that were begun before `beforeMs` and never ended: their processes are dead. Returns how many went. */
  async abortUploads(prefix: string, beforeMs: number): Promise<number> {
    const { ListMultipartUploadsCommand } = await loadSdk();
    return this.#ask('list of unfinished uploads', 0, async (abortSignal) => {
      const client = await this.#access.sdk();
      const listed = await client.send(new ListMultipartUploadsCommand({ Bucket: this.#bucket, Prefix: prefix }), {
        abortSignal,
      });
      let aborted = 0;
      for (const { Key, UploadId, Initiated } of listed.Uploads ?? []) {
        if (!Key?.startsWith(prefix) || UploadId === undefined || Initiated === undefined) continue;
        if (Initiated.getTime() >= beforeMs) continue;
        await this.#abort(Key, UploadId);
        aborted++;
      }
      return aborted;
    });
  }

  async #multipart(
    key: string,
    sizeBytes: number,
    read: (offset: number, length: number) => Promise<Buffer>,
  ): Promise<void> {
    const { CompleteMultipartUploadCommand, CreateMultipartUploadCommand, HeadObjectCommand, UploadPartCommand } =
      await loadSdk();
    const client = await this.#access.sdk();
    const object = { Bucket: this.#bucket, Key: key };
    const partBytes = Math.max(this.#partBytes, Math.ceil(sizeBytes / MAX_PARTS / 4096) * 4096);
    const count = Math.ceil(sizeBytes / partBytes);
    const uploadId = await this.#ask(`upload of ${key}`, 0, async (abortSignal) => {
      const { UploadId } = await client.send(new CreateMultipartUploadCommand(object), { abortSignal });
      if (!UploadId)
        throw fail('STORE_REMOTE_ANSWER', { store: this.#store, action: `upload of ${key}`, what: 'no upload id' });
      return UploadId;
    });
    const tags: string[] = new Array(count);
    const ending = new AbortController();
    try {
      let next = 0;
      const sendParts = async () => {
        while (next < count && !ending.signal.aborted) {
          const part = next++;
          const length = Math.min(partBytes, sizeBytes - part * partBytes);
          const body = await read(part * partBytes, length);
          const action = `upload of ${key}, part ${part + 1} of ${count}`;
          tags[part] = await this.#ask(
            action,
            length,
            async (abortSignal) => {
              const command = new UploadPartCommand({
                ...object,
                UploadId: uploadId,
                PartNumber: part + 1,
                Body: body,
              });
              const { ETag } = await client.send(command, { abortSignal });
              if (!ETag)
                throw fail('STORE_REMOTE_ANSWER', { store: this.#store, action, what: 'a part without its tag' });
              return ETag;
            },
            ending.signal,
          );
        }
      };
      const senders = Array.from({ length: Math.min(PARTS_AT_ONCE, count) }, () =>
        sendParts().catch((error) => {
          ending.abort(error);
          throw error;
        }),
      );
      // All of them are over before the upload is aborted, or a late part would bring it back.
      const outcomes = await Promise.allSettled(senders);
      if (outcomes.some(({ status }) => status === 'rejected')) throw ending.signal.reason;
      await this.#ask(`completion of ${key}`, 0, async (abortSignal) => {
        const Parts = tags.map((ETag, part) => ({ ETag, PartNumber: part + 1 }));
        const command = new CompleteMultipartUploadCommand({
          ...object,
          UploadId: uploadId,
          MultipartUpload: { Parts },
        });
        await client.send(command, { abortSignal }).catch(async (error) => {
          // A retry of a completion whose answer was lost finds no such upload any more: it is the object that counts.
          const found = await client.send(new HeadObjectCommand(object), { abortSignal }).catch(() => undefined);
          if (found?.ContentLength !== sizeBytes) throw error;
        });
      });
    } catch (error) {
      await this.#abort(key, uploadId).catch(() => {});
      throw error;
    }
  }

  async #abort(key: string, uploadId: string): Promise<void> {
    const { AbortMultipartUploadCommand } = await loadSdk();
    await this.#ask(`end of the upload of ${key}`, 0, async (abortSignal) => {
      const client = await this.#access.sdk();
      const command = new AbortMultipartUploadCommand({ Bucket: this.#bucket, Key: key, UploadId: uploadId });
      await client.send(command, { abortSignal });
    });
  }

  get #bucket(): string {
    return this.#access.location.bucket;
  }

  get #store(): string {
    return this.#access.location.url;
  }

  /** Within a deadline; what the SDK throws becomes an error of the store. */
  async #ask<T>(
    action: string,
    bytes: number,
    work: (signal: AbortSignal) => Promise<T>,
    outer?: AbortSignal,
  ): Promise<T> {
    const { signedQuery } = this.#access.location;
    if (signedQuery !== undefined) {
      throw fail('STORE_NO_WRITES', { store: this.#store, why: 'signed-query is a way to read only' });
    }
    const asked: Asked = { store: this.#store, bucket: this.#bucket, action };
    const ending = new AbortController();
    const onAbort = () => ending.abort(outer!.reason);
    outer?.addEventListener('abort', onAbort, { once: true });
    const timeoutMs = DEADLINE_MS + (bytes / SLOWEST_BYTES) * 1000;
    const timer = setTimeout(() => {
      ending.abort(fail('STORE_TIMEOUT', { what: `${this.#store}: ${action}`, timeoutMs: Math.round(timeoutMs) }));
    }, timeoutMs);
    try {
      outer?.throwIfAborted();
      // The SDK tries again what it knows; this is for odd answers, such as a gateway gives whose folder vanished under it.
      return await retryCall(
        (signal) =>
          work(signal === undefined ? ending.signal : abortSignalOf(signal)).catch((error) => {
            throw signal?.aborted ? signal.reason : sdkFailure(asked, error);
          }),
        () => `${this.#store}: ${action}`,
        { attempts: 4, budgetMs: timeoutMs, tryTimeoutMs: timeoutMs },
        ending.signal,
      );
    } catch (error) {
      if (ending.signal.aborted) throw ending.signal.reason;
      throw error;
    } finally {
      clearTimeout(timer);
      outer?.removeEventListener('abort', onAbort);
    }
  }
}

async function readPart(file: FileHandle, path: string, offset: number, length: number): Promise<Buffer> {
  const bytes = Buffer.allocUnsafeSlow(length);
  const got = await readFully(file, bytes, offset).catch((error: unknown) => {
    throw fail('STORE_IO', { store: path, path, reason: messageOf(error) }, error);
  });
  if (got < length) throw fail('STORE_IO', { store: path, path, reason: `it became shorter while it was sent` });
  return bytes;
}
