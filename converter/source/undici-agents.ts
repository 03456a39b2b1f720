/**
 * What we use of undici as named exports: a bundle gives a CommonJS package that is imported at run time only its default
 * one. Imported at run time itself, since loading undici takes 60 ms that most commands need not spend.
 */
export { Agent, EnvHttpProxyAgent, request } from 'undici';
