/**
 * The schemas of routes, compiled when the first request or answer needs them: a service has hundreds, a process uses a few dozen, and all of them
 * at once are most of what its start costs. What is checked, and every error, is as with fastify's own compilers, which these are, but for two things: names of
 * headers in a schema are in small letters, which fastify sees to for its own compilers alone, and a whole body is no number or text in JSON that stands for another.
 */
import { createRequire } from 'node:module';
import type { FastifyServerOptions } from 'fastify';

type SchemaController = NonNullable<FastifyServerOptions['schemaController']>;
type Factories = NonNullable<SchemaController['compilersFactory']>;
type BuildValidator = NonNullable<Factories['buildValidator']>;
type BuildSerializer = NonNullable<Factories['buildSerializer']>;

/** Loaded when an app is made: commands that serve nothing have this file too. */
const require = createRequire(import.meta.url);

/** For `fastify({ schemaController })`; one for each app. */
export function compileOnFirstUse(): SchemaController {
  const { AjvCompiler } = require('@fastify/ajv-compiler') as typeof import('@fastify/ajv-compiler');
  const { SerializerSelector } =
    require('@fastify/fast-json-stringify-compiler') as typeof import('@fastify/fast-json-stringify-compiler');
  const validators = AjvCompiler();
  const serializers = SerializerSelector();
  const buildValidator: BuildValidator = (schemas, options) => {
    const compiler = once(() => validators(schemas, options));
    return (route) => {
      refuseCapitals(route);
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

/** Of headers: a name that is never found would never be checked. */
function refuseCapitals({ httpPart, schema, url }: { httpPart?: string; schema: unknown; url?: string }): void {
  if (httpPart !== 'headers') return;
  const { properties = {} } = schema as { properties?: object };
  const name = Object.keys(properties).find((each) => each !== each.toLowerCase());
  if (name !== undefined)
    throw new Error(`${url ?? ''}: the schema has the header ${name}, whose name has to be in small letters`);
}

function once<T>(make: () => T): () => T {
  let made: { readonly value: T } | undefined;
  return () => {
    made ??= { value: make() };
    return made.value;
  };
}
