/** The body of an answer, piece by piece: not every browser lets `for await` walk a ReadableStream. */

/** @param {Response} response @returns {AsyncGenerator<Uint8Array>} */
export async function* bodyChunks(response) {
  if (response.body === null) return;
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    // Whoever stops reading does not want the rest.
    reader.cancel().catch(() => {});
  }
}
