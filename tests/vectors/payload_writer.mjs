// The payload container of docs/protocol.md in JavaScript, written from that page alone: the second implementation.
//
//   node payload_writer.mjs write < contents.json    contents to payloads in hex
//   node payload_writer.mjs read < hex.json          payloads in hex to contents
//
// Contents are {metadata, arrays: {NAME: {dtype, shape, values}}}. The writer does what a JavaScript programmer does
// without thinking: keys in the order they come, numbers as JSON.stringify has them, text unescaped, no padding.

const BYTES = { F16: 2, F32: 4, F64: 8, U8: 1, I8: 1, U16: 2, U32: 4, I32: 4, U64: 8, I64: 8, BOOL: 1 };
const METHOD = { F32: 'Float32', F64: 'Float64', U8: 'Uint8', I8: 'Int8', U16: 'Uint16', U32: 'Uint32', I32: 'Int32',
  U64: 'BigUint64', I64: 'BigInt64', BOOL: 'Uint8', F16: 'Uint16' };

function fromHalf(bits) {
  const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
}

function toHalf(number) { // exact values only
  for (let bits = 0; bits < 65536; bits++) if (Object.is(fromHalf(bits), number)) return bits;
  throw new Error(`${number} is not a half`);
}

export function write({ metadata, arrays }) {
  for (const value of Object.values(metadata).flat()) {
    if (Number.isInteger(value) && !Number.isSafeInteger(value) && !String(value).includes('e')) {
      throw new Error(`${value} would be an integer that not every reader holds`);
    }
  }
  const header = {};
  let end = 0;
  for (const [name, { dtype, shape }] of Object.entries(arrays)) {
    const begin = end;
    end += shape.reduce((product, n) => product * n, 1) * BYTES[dtype];
    header[name] = { shape, dtype, data_offsets: [begin, end] };
  }
  header.__metadata__ = Object.fromEntries(
    Object.entries(metadata).map(([key, value]) => [key, JSON.stringify(value, null, 1)]));
  const text = new TextEncoder().encode(JSON.stringify(header));
  const data = new Uint8Array(8 + text.length + end);
  const view = new DataView(data.buffer);
  view.setBigUint64(0, BigInt(text.length), true);
  data.set(text, 8);
  for (const [name, { dtype, values }] of Object.entries(arrays)) {
    const at = 8 + text.length + header[name].data_offsets[0];
    values.forEach((value, i) => {
      const stored = dtype === 'F16' ? toHalf(value) : dtype.endsWith('64') && dtype !== 'F64' ? BigInt(value) : +value;
      view['set' + METHOD[dtype]](at + i * BYTES[dtype], stored, true);
    });
  }
  return data;
}

export function read(data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const size = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(data.subarray(8, 8 + size)));
  const metadata = Object.fromEntries(
    Object.entries(header.__metadata__ ?? {}).map(([key, text]) => [key, JSON.parse(text)]));
  delete header.__metadata__;
  const arrays = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(header)) {
    const values = [];
    for (let at = begin; at < end; at += BYTES[dtype]) {
      const value = view['get' + METHOD[dtype]](8 + size + at, true);
      values.push(dtype === 'BOOL' ? value === 1 : dtype === 'F16' ? fromHalf(value) : value);
    }
    arrays[name] = { dtype, shape, values };
  }
  return { metadata, arrays };
}

async function main(command) {
  let text = '';
  for await (const chunk of process.stdin) text += chunk;
  const done = JSON.parse(text).map(command === 'write'
    ? (content) => Buffer.from(write(content)).toString('hex')
    : (hex) => read(Uint8Array.from(Buffer.from(hex, 'hex'))));
  const plain = (_, value) => (typeof value === 'bigint' ? Number(value) : Object.is(value, -0) ? 0 : value);
  console.log(JSON.stringify(done, plain));
}

if (process.argv[1]?.endsWith('payload_writer.mjs')) await main(process.argv[2]);
