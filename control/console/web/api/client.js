/**
 * The public API, asked with the token of this session. Every failure is an `ApiError` with what the server says of it; a network that is away
 * is one as well (`UNREACHABLE`).
 */

export class ApiError extends Error {
  /** @param {{ code?: string, message: string, hint?: string, retryable?: boolean, requestId?: string, status?: number }} of */
  constructor({ code = 'UNKNOWN', message, hint, retryable = false, requestId, status = 0 }) {
    super(message);
    this.code = code;
    this.hint = hint;
    this.retryable = retryable;
    this.requestId = requestId;
    this.status = status;
  }
}

/** A path with every value encoded: names may hold anything. @param {TemplateStringsArray} parts @param {...(string | number)} values */
export function path(parts, ...values) {
  return parts.reduce((text, part, i) => text + encodeURIComponent(String(values[i - 1])) + part);
}

/** Values that are undefined or '' are left out. @param {Record<string, string | number | boolean | undefined>} values */
export function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== '');
  return given.length === 0 ? '' : `?${new URLSearchParams(given.map(([k, v]) => [k, String(v)]))}`;
}

/** @typedef {{ method?: string, json?: unknown, bytes?: Uint8Array, signal?: AbortSignal }} Asking */

export class ApiClient {
  /** @param {string} token @param {{ base: URL, refused?: () => void, fetch?: typeof fetch }} options */
  constructor(token, { base, refused = () => {}, fetch: ask = (...args) => fetch(...args) }) {
    this.token = token;
    this.base = base;
    this.refused = refused;
    this.ask = ask;
  }

  /** A body that is read as it comes. @param {string} where `/v1/...` @param {Asking} [asking] @returns {Promise<Response>} @throws ApiError */
  async open(where, { method = 'GET', json, bytes, signal } = {}) {
    const headers = new Headers({ authorization: `Bearer ${this.token}` });
    if (json !== undefined) headers.set('content-type', 'application/json');
    if (bytes !== undefined) headers.set('content-type', 'application/octet-stream');
    const body = json === undefined ? /** @type {BodyInit | undefined} */ (bytes) : JSON.stringify(json);
    let response;
    try {
      const options = { method, headers, body, signal, cache: /** @type {const} */ ('no-store') };
      response = await this.ask(new URL(where.slice(1), this.base), { ...options, credentials: 'omit' });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError({ code: 'UNREACHABLE', message: 'The server does not answer.', retryable: true });
    }
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status === 401) this.refused();
    throw error;
  }

  /** @param {string} where @param {Asking} [asking] @returns {Promise<any>} */
  async json(where, asking) {
    const response = await this.open(where, asking);
    const text = await response.text();
    try {
      return text === '' ? {} : JSON.parse(text);
    } catch {
      throw new ApiError({
        code: 'BAD_ANSWER',
        message: `The answer to ${where} is no JSON.`,
        status: response.status,
      });
    }
  }

  /** @param {string} where @param {unknown} [json] @param {AbortSignal} [signal] */
  post(where, json = {}, signal) {
    return this.json(where, { method: 'POST', json, signal });
  }

  /** @param {string} where */
  remove(where) {
    return this.json(where, { method: 'DELETE' });
  }
}

/** @param {Response} response */
async function errorOf(response) {
  const { status } = response;
  try {
    const { error } = JSON.parse(await response.text());
    return new ApiError({ ...error, message: String(error.message), status });
  } catch {
    return new ApiError({ code: `HTTP_${status}`, message: `The server answered ${status}.`, status });
  }
}
