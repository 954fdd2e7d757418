// Offer the service `shout` in X1 (docs/reference/x1.md).  Needs Node 18 and the package zeromq 6.

import { Dealer } from 'zeromq'

const BROKER = process.argv[2] ?? 'tcp://127.0.0.1:5555'
const SERVICE = 'shout', CREDIT = 4
const INTERVAL = 1000, LIVENESS = 5 // milliseconds between heartbeats; silent intervals until a peer is dead
const READY = 1, REQUEST = 2, FINAL = 4, DISCONNECT = 6, ERROR = 7
const ATTACHED = 0xffffffff

async function handle(body) {
  if (body.length === 1 && body[0].length === 0) throw new Error('nothing to shout')
  return body.map(frame => Buffer.from(frame.toString().toUpperCase()))
}

const number = (size, value) => { // an unsigned integer of so many bytes
  const bytes = Buffer.alloc(size)
  size === 8 ? bytes.writeBigUInt64BE(value) : bytes.writeUIntBE(value, 0, size)
  return bytes
}
const counted = (size, bytes) => Buffer.concat([number(size, bytes.length), bytes])
const packBody = frames => Buffer.concat([number(2, frames.length), ...frames.map(frame => counted(4, frame))])

function record(command, id, ...fields) {
  return counted(4, Buffer.concat([number(1, command), number(8, id), ...fields]))
}

function * records(data) { // command, id and fields of each record
  for (let at = 0; at < data.length; at += 4 + data.readUInt32BE(at)) {
    yield [data[at + 4], data.readBigUInt64BE(at + 5), data.subarray(at + 13, at + 4 + data.readUInt32BE(at))]
  }
}

function readBody(data, at, attachments) {
  const frames = []
  for (let left = data.readUInt16BE(at), size = (at += 2, 0); left > 0; left--, at += size) {
    size = data.readUInt32BE(at)
    at += 4
    frames.push(size === ATTACHED ? attachments.shift() : data.subarray(at, at + size))
    if (size === ATTACHED) size = 0
  }
  return frames
}

let stop = false
let leave = () => { stop = true }
process.on('SIGTERM', () => leave())

// Serve over one connection, until the broker ends it or falls silent.
async function serve() {
  const broker = new Dealer({ linger: 0 })
  broker.connect(BROKER)
  let heard = Date.now(), sent = heard, queue = Promise.resolve()
  const send = (...parts) => { // without records, a HEARTBEAT; one message at a time
    sent = Date.now()
    const message = ['', 'MDPWX1', ...(parts.length ? ['\x09', Buffer.concat(parts)] : [])]
    queue = queue.then(() => broker.send(message)).catch(() => {}) // the connection is closed
  }
  leave = () => { stop = true; send(record(DISCONNECT, 0n)) } // ask for no more requests
  const beat = setInterval(() => {
    if (Date.now() > heard + INTERVAL * LIVENESS) broker.close()
    else if (Date.now() >= sent + INTERVAL) send()
  }, INTERVAL / 4)
  send(record(READY, 0n, number(4, CREDIT), counted(1, Buffer.from(SERVICE)), number(2, 0)))
  try {
    for await (const [, , , data = Buffer.alloc(0), ...attachments] of broker) {
      heard = Date.now()
      for (const [command, address, fields] of records(data)) {
        if (command === DISCONNECT) return
        if (command !== REQUEST) continue
        handle(readBody(fields, 7 + fields.readUInt16BE(5), attachments)).then(
          reply => send(record(FINAL, address, packBody(reply))),
          error => send(record(ERROR, address, number(2, 500), number(3, 0), counted(2, Buffer.from(`${error}`)), packBody([]))))
      }
    }
  } finally {
    clearInterval(beat)
    if (!broker.closed) broker.close()
  }
}

while (!stop) await serve()
