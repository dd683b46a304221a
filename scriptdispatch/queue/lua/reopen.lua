-- reopen: looks at these lanes again.
-- args     {now ms, {device, ...}}
-- answers  true
local now = args[1]
for _, device in ipairs(args[2]) do look_at(device) end
settle(now)
wake()
return pack(true)
