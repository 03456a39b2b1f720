/**
 * JSON from outside, read field by field: a wrong value is an error that names the file and the field
 * (`layers[2].digest`), never an undefined that travels on. Unknown fields are ignored, as the OCI specifications ask.
 */
import { type Digest, messageOf, parseDigest } from '#base';
import { fail } from '../errors.ts';
import { quote } from './quote.ts';

export class JsonFields {
  /** File, blob or answer that holds the value: for messages. */
  readonly where: string;
  /** `layers[2].digest`; empty for the whole. */
  readonly path: string;
  readonly value: unknown;

  constructor(where: string, path: string, value: unknown) {
    this.where = where;
    this.path = path;
    this.value = value;
  }

  /** @throws SOURCE_JSON */
  static parse(bytes: Buffer, where: string): JsonFields {
    let text: string;
    try {
      text = new TextDecoder('utf-8', { fatal: true }).decode(bytes);
    } catch {
      throw fail('SOURCE_JSON', { where, problem: 'not UTF-8' });
    }
    try {
      return new JsonFields(where, '', JSON.parse(text));
    } catch (error) {
      throw fail('SOURCE_JSON', { where, problem: quote(messageOf(error), 120) });
    }
  }

  get present(): boolean {
    return this.value !== undefined && this.value !== null;
  }

  get(key: string): JsonFields {
    const object = this.object();
    const value = Object.hasOwn(object, key) ? object[key] : undefined;
    return new JsonFields(this.where, this.path === '' ? key : `${this.path}.${key}`, value);
  }

  object(): Record<string, unknown> {
    if (typeof this.value !== 'object' || this.value === null || Array.isArray(this.value))
      throw this.wrong('an object');
    return this.value as Record<string, unknown>;
  }

  array(limit = 100_000): JsonFields[] {
    if (!Array.isArray(this.value)) throw this.wrong('a list');
    if (this.value.length > limit) throw this.problem(`${this.value.length} entries, more than ${limit}`);
    return this.value.map((item, i) => new JsonFields(this.where, `${this.path}[${i}]`, item));
  }

  string(): string {
    if (typeof this.value !== 'string') throw this.wrong('a string');
    return this.value;
  }

  optionalString(): string | undefined {
    return this.present ? this.string() : undefined;
  }

  size(): number {
    if (typeof this.value !== 'number' || !Number.isSafeInteger(this.value) || this.value < 0) {
      throw this.wrong('a whole number, 0 or more');
    }
    return this.value;
  }

  digest(): Digest {
    const digest = parseDigest(this.value);
    if (digest === undefined) throw this.wrong('a digest (sha256: and 64 lower-case hex digits)');
    return digest;
  }

  /** A map of strings; empty when the field is absent. */
  strings(): Map<string, string> {
    const out = new Map<string, string>();
    if (!this.present) return out;
    for (const key of Object.keys(this.object())) out.set(key, this.get(key).string());
    return out;
  }

  problem(problem: string) {
    return fail('SOURCE_FIELD', { where: this.where, field: this.path === '' ? '(top)' : this.path, problem });
  }

  private wrong(wanted: string) {
    if (this.value === undefined) return this.problem(`missing; it must be ${wanted}`);
    return this.problem(`${quote(JSON.stringify(this.value) ?? String(this.value), 80)} is not ${wanted}`);
  }
}
