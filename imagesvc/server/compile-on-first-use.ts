/**
 * The schemas of routes, compiled when the first request or answer needs them: a service has hundreds, a process uses a few dozen, and all of them
 * at once are most of what its start costs. What is checked, and every error, is as with fastify's own compilers, which these are.
 */
import { AjvCompiler } from '@fastify/ajv-compiler';
import { SerializerSelector } from '@fastify/fast-json-stringify-compiler';
import type { FastifyServerOptions } from 'fastify';

type SchemaController = NonNullable<FastifyServerOptions['schemaController']>;
type Factories = NonNullable<SchemaController['compilersFactory']>;
type BuildValidator = NonNullable<Factories['buildValidator']>;
type BuildSerializer = NonNullable<Factories['buildSerializer']>;

/** For `fastify({ schemaController })`; one for each app. */
export function compileOnFirstUse(): SchemaController {
  const validators = AjvCompiler();
  const serializers = SerializerSelector();
  const buildValidator: BuildValidator = (schemas, options) => {
    const compiler = once(() => validators(schemas, options));
    return (route) => {
      const compiled = once(() => compiler()(route));
      const validate = (data: unknown) => {
        const found = compiled()(data);
        // Where fastify looks for them.
        Object.assign(validate, { errors: compiled().errors });
        return found;
      };
      return validate as ReturnType<ReturnType<BuildValidator>>;
    };
  };
  const buildSerializer: BuildSerializer = (schemas, options) => {
    const compiler = once(() => serializers(schemas, options));
    return (route) => {
      const compiled = once(() => compiler()(route));
      return (answer) => compiled()(answer);
    };
  };
  return { compilersFactory: { buildValidator, buildSerializer } };
}

function once<T>(make: () => T): () => T {
  let made: { readonly value: T } | undefined;
  return () => {
    made ??= { value: make() };
    return made.value;
  };
}
