/** Where sandboxes are asked for over HTTP: the socket of this machine's runtime service, or the API of a cluster with a token. */
import { readFileSync } from 'node:fs';
import { Agent, type ClientRequest, request as httpRequest, type RequestOptions } from 'node:http';
import { request as httpsRequest, Agent as SecureAgent } from 'node:https';
import { messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

export interface ApiEndpoint {
  readonly url: string;
  readonly token: string | undefined;
  readonly caFile?: string;
  /** Nobody named the API: this context is current. */
  readonly currentContext?: string;
}

/** A path: of a socket. */
export type ServiceAddress = string | ApiEndpoint;

const agents = new Map<string, Agent | SecureAgent>();

/** Not ended. @throws CONTEXT_TOKEN */
export function requestTo(address: ServiceAddress, { path, headers, ...options }: RequestOptions): ClientRequest {
  if (typeof address === 'string') return httpRequest({ ...options, path, headers, socketPath: address });
  const { url, token, caFile } = address;
  const { hostname, port, protocol, pathname } = new URL(url);
  const isSecure = protocol === 'https:';
  const asked = {
    ...options,
    agent: agentOf(isSecure, caFile),
    host: hostname.replace(/^\[|\]$/g, ''),
    port: port === '' ? undefined : port,
    path: `${pathname.replace(/\/+$/, '')}${path}`,
    headers: { ...(headers as object), ...(token === undefined ? {} : { authorization: `Bearer ${token}` }) },
  };
  return isSecure ? httpsRequest(asked) : httpRequest(asked);
}

/** What a broken connection to it is told as. */
export function connectionProblem(address: ServiceAddress, error: unknown): Error {
  const code = systemCode(error) ?? '';
  const problem = messageOf(error) || code;
  const away = [
    'ENOENT',
    'ECONNREFUSED',
    'ENOTFOUND',
    'EAI_AGAIN',
    'EHOSTUNREACH',
    'ENETUNREACH',
    'ETIMEDOUT',
  ].includes(code);
  if (typeof address !== 'string') {
    if (away || /CERT|TLS|SSL|SELF_SIGNED/.test(code))
      return fail('SERVICE_UNREACHABLE', { url: address.url, reason: problem, wayBack: wayBack(address) }, error);
    return fail('SERVICE_LOST', { url: address.url, reason: problem }, error);
  }
  return away ? fail('SANDBOX_NO_SERVICE', { socket: address }) : fail('SANDBOX_PROTOCOL', { problem }, error);
}

/** For whoever does not know, or not any more, why a cluster is asked. */
function wayBack({ currentContext }: ApiEndpoint): string {
  if (currentContext === undefined) return '';
  return `; context ${currentContext} is current: for this machine --api local, or \`dsec context use local\``;
}

function agentOf(isSecure: boolean, caFile: string | undefined): Agent | SecureAgent {
  const key = `${isSecure} ${caFile ?? ''}`;
  let agent = agents.get(key);
  if (agent === undefined) {
    agent = isSecure
      ? new SecureAgent({ keepAlive: true, ...(caFile === undefined ? {} : { ca: authority(caFile) }) })
      : new Agent({ keepAlive: true });
    agents.set(key, agent);
  }
  return agent;
}

function authority(file: string): Buffer {
  try {
    return readFileSync(file);
  } catch (error) {
    throw fail('SERVICE_TLS_FILE', { file, problem: messageOf(error) }, error);
  }
}
