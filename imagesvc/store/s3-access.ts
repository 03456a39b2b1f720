/**
 * Who we are to an S3 server, and the SDK's client. Keys in the environment are taken at once; everything else (profiles, SSO, web
 * identity, containers, instance metadata) is the SDK's credentials chain, which takes long to load and is loaded only then, or
 * at the first write.
 */
import { readFile } from 'node:fs/promises';
import type { S3Client } from '@aws-sdk/client-s3';
import { messageOf } from '#base';
import { fail } from '../errors.ts';
import type { S3Credentials } from './s3-signer.ts';
import type { S3Location } from './s3-url.ts';

const DEFAULT_REGION = 'us-east-1';
const CONNECT_TIMEOUT_MS = 10_000;
const ANSWER_TIMEOUT_MS = 60_000;
const SDK_ATTEMPTS = 5;

/** The SDK, quietly: that it will want a newer Node some day is not the user's business here. */
export function loadSdk(): Promise<typeof import('./s3-sdk.ts')> {
  process.env.AWS_SDK_JS_NODE_VERSION_SUPPORT_WARNING_DISABLED ??= 'true';
  return import('./s3-sdk.ts');
}

export class S3Access {
  readonly location: S3Location;
  readonly #env: NodeJS.ProcessEnv;
  #sdk: Promise<S3Client> | undefined;
  #region: Promise<string> | undefined;
  #authorities: Promise<string[] | undefined> | undefined;

  constructor(location: S3Location, env: NodeJS.ProcessEnv = process.env) {
    this.location = location;
    this.#env = env;
  }

  /** Of the URL or the environment, else of the profile, else us-east-1 (which other servers than AWS take). */
  region(): Promise<string> {
    this.#region ??= this.#findRegion();
    return this.#region;
  }

  async #findRegion(): Promise<string> {
    const { region, endpoint, anonymous, signedQuery } = this.location;
    if (region !== undefined) return region;
    if (endpoint !== undefined || anonymous || signedQuery !== undefined || this.#inEnvironment())
      return DEFAULT_REGION;
    const { S3Client } = await loadSdk();
    const found = new S3Client({ profile: this.location.profile }).config.region();
    return found.catch(() => DEFAULT_REGION);
  }

  /** Undefined where requests are not signed. Renewed by the chain before they expire. @throws STORE_CREDENTIALS */
  async credentials(): Promise<S3Credentials | undefined> {
    if (this.location.anonymous || this.location.signedQuery !== undefined) return undefined;
    const own = this.#inEnvironment();
    if (own !== undefined) return own;
    const client = await this.sdk();
    try {
      return await client.config.credentials();
    } catch (error) {
      throw fail('STORE_CREDENTIALS', { store: this.location.url, reason: messageOf(error) }, error);
    }
  }

  /** Looks for credentials anew: the server says that those it saw have expired. */
  forget(): void {
    this.#sdk = undefined;
  }

  /** A profile that is asked for goes before keys in the environment. */
  #inEnvironment(): S3Credentials | undefined {
    const { AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE } = this.#env;
    if (!AWS_ACCESS_KEY_ID || !AWS_SECRET_ACCESS_KEY || AWS_PROFILE || this.location.profile) return undefined;
    return {
      accessKeyId: AWS_ACCESS_KEY_ID,
      secretAccessKey: AWS_SECRET_ACCESS_KEY,
      sessionToken: AWS_SESSION_TOKEN || undefined,
    };
  }

  /** PEM texts to trust, or undefined for Node's own choice. @throws STORE_CERTIFICATE */
  authorities(): Promise<string[] | undefined> {
    this.#authorities ??= this.#readAuthorities();
    return this.#authorities;
  }

  async #readAuthorities(): Promise<string[] | undefined> {
    const { caFile, url } = this.location;
    if (caFile === undefined) return undefined;
    const { rootCertificates } = await import('node:tls');
    try {
      return [...rootCertificates, await readFile(caFile, 'utf8')];
    } catch (error) {
      throw fail('STORE_CERTIFICATE', { store: url, reason: `the file of authorities: ${messageOf(error)}` }, error);
    }
  }

  sdk(): Promise<S3Client> {
    this.#sdk ??= this.#makeSdk();
    return this.#sdk;
  }

  async #makeSdk(): Promise<S3Client> {
    const { endpoint, pathStyle, profile, anonymous } = this.location;
    const [{ S3Client }, region, ca] = await Promise.all([loadSdk(), this.region(), this.authorities()]);
    const client = new S3Client({
      region,
      endpoint: endpoint?.href,
      forcePathStyle: pathStyle,
      profile,
      credentials: anonymous ? { accessKeyId: 'anonymous', secretAccessKey: 'anonymous' } : this.#inEnvironment(),
      ...(anonymous ? { signer: { sign: async (request) => request } } : {}),
      maxAttempts: SDK_ATTEMPTS,
      // Not every server knows the SDK's own checksums; bodies are signed with their sha256, and blobs carry theirs.
      requestChecksumCalculation: 'WHEN_REQUIRED',
      responseChecksumValidation: 'WHEN_REQUIRED',
      requestHandler: {
        connectionTimeout: CONNECT_TIMEOUT_MS,
        requestTimeout: ANSWER_TIMEOUT_MS,
        throwOnRequestTimeout: true,
        ...(ca === undefined ? {} : { httpsAgent: { ca, keepAlive: true } }),
      },
      logger: undefined,
    });
    return client;
  }
}
