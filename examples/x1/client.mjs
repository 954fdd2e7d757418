// Call the service `shout` in X1 (docs/reference/x1.md).  Needs Node 18 and the package zeromq 6.

import { Dealer } from 'zeromq'

const BROKER = process.argv[2] ?? 'tcp://127.0.0.1:5555'
const INTERVAL = 1000, LIVENESS = 5 // as in the worker
const REQUEST = 1, PARTIAL = 2, FINAL = 3, ERROR = 4
const ATTACHED = 0xffffffff

const number = (size, value) => { // an unsigned integer of so many bytes
  const bytes = Buffer.alloc(size)
  size === 8 ? bytes.writeBigUInt64BE(value) : bytes.writeUIntBE(value, 0, size)
  return bytes
}
const counted = (size, bytes) => Buffer.concat([number(size, bytes.length), bytes])

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

// Sends any number of requests over one connection, and replaces it if the broker is silent.
class Client {
  outstanding = new Map() // by number: the record, what settles the promise, and whether a part has arrived
  next = 1n

  constructor() { this.done = this.run() }

  request(service, body, { ttl = 0, ...options } = {}) {
    const raw = Buffer.from(Object.keys(options).length ? JSON.stringify(options) : '')
    const frames = body.map(each => counted(4, Buffer.from(each)))
    const fields = [number(4, ttl), counted(1, Buffer.from(service)), counted(2, raw), number(2, frames.length), ...frames]
    const id = this.next++
    const record = counted(4, Buffer.concat([number(1, REQUEST), number(8, id), ...fields]))
    return new Promise((resolve, reject) => {
      this.outstanding.set(id, { record, resolve, reject, parts: [] })
      this.send(record)
    })
  }

  send(...parts) { // without records, a HEARTBEAT; one message at a time
    const message = ['', 'MDPCX1', ...(parts.length ? ['\x09', Buffer.concat(parts)] : [])]
    const broker = this.broker
    this.queue = this.queue.then(() => broker.send(message)).catch(() => {}) // the silence will show it
  }

  async run() {
    while (!this.closed) {
      const broker = this.broker = new Dealer({ linger: 0, reconnectInterval: -1 }) // a new connection is a new client
      this.queue = Promise.resolve()
      broker.connect(BROKER)
      if (this.outstanding.size) this.send(...[...this.outstanding.values()].map(each => each.record))
      let heard = Date.now()
      const beat = setInterval(() => {
        if (Date.now() > heard + INTERVAL * LIVENESS) broker.close()
        else if (Date.now() > heard + INTERVAL && this.outstanding.size) this.send()
      }, INTERVAL)
      for await (const [, , , data = Buffer.alloc(0), ...attachments] of broker) {
        heard = Date.now()
        for (const [command, id, fields] of records(data)) this.take(command, this.outstanding.get(id), id, fields, attachments)
      }
      clearInterval(beat)
      for (const [id, each] of this.outstanding) { // what has begun cannot be repeated
        if (each.parts.length) this.take(ERROR, each, id, Buffer.concat([number(2, 502), number(5, 0)]), [])
      }
    }
  }

  take(command, asked, id, fields, attachments) {
    if (command === FINAL || command === ERROR) this.outstanding.delete(id)
    if (command === PARTIAL) asked?.parts.push(...readBody(fields, 0, attachments))
    else if (command === FINAL) asked?.resolve([...asked.parts, ...readBody(fields, 0, attachments)])
    else if (command === ERROR) asked?.reject([fields.readUInt16BE(0), fields.subarray(7 + fields[4]).subarray(0, fields.readUInt16BE(5 + fields[4]))])
  }

  close() { this.closed = true; this.broker.close(); return this.done }
}

const client = new Client()
const asked = [
  client.request('shout', ['hello', 'world'], { ttl: 30000 }),
  client.request('shout', ['']),
  client.request('whisper', ['hello'], { wait: false })
]
const told = await Promise.allSettled(asked)
told.forEach(({ value, reason }, at) => console.log(at + 1, value ? 'reply' : 'ERROR', (value ?? reason).join(' ')))
await client.close()
