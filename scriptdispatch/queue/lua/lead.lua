-- lead: takes or renews the leader's lease.
-- args     {now ms, node id, ms until which it holds, the highest term that the caller has seen}
-- answers  the term, or 0 if another node leads
-- The term only rises, also when Redis has lost its memory (no epoch): then it goes on from the server's clock in ms, which
-- is beyond every term given before. A lease that ran out is taken in a new term also by its last holder.
--   leader      hash    node, term, until
local now, node, ends, seen = args[1], args[2], args[3], args[4]
local LEADER, FROM_CLOCK = at .. 'leader', 1e9
local row = call('HMGET', LEADER, 'node', 'term', 'until')
local term = tonumber(row[2] or 0)
local in_force = row[1] and tonumber(row[3]) > now
if in_force and row[1] ~= node then return pack(0) end
if not in_force then
  term = math.max(term, seen) + 1
  if term > FROM_CLOCK or call('EXISTS', at .. 'epoch') == 0 then
    local time = call('TIME')
    term = math.max(term, tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
  end
end
call('HSET', LEADER, 'node', node, 'term', string.format('%.0f', term), 'until', string.format('%.0f', ends))
return pack(term)
