// This file keeps each cache salt once for all the blocks that have it.

package engine

// salts numbers the salts of blocks; 0 is none. A salt goes with its last block.
type salts struct {
	ids   map[string]uint32
	names []string // by id
	refs  []uint32 // by id, in blocks
	free  []uint32
	bytes int // of names
}

// maxSalts bounds the salts of a mapping, in bytes: users choose them.
const maxSalts = 64 << 20

// room reports whether a salt is known or may be added.
func (s *salts) room(name string) bool {
	_, ok := s.ids[name]
	return ok || s.bytes+len(name) <= maxSalts
}

// id returns the number of a salt, which must be held or released.
func (s *salts) id(name string) uint32 {
	if name == "" {
		return 0
	}
	if id, ok := s.ids[name]; ok {
		return id
	}
	if s.ids == nil {
		s.ids = make(map[string]uint32)
		s.names, s.refs = make([]string, 1), make([]uint32, 1)
	}
	name = string(append([]byte(nil), name...)) // name may be part of a payload
	var id uint32
	if n := len(s.free); n > 0 {
		id, s.free = s.free[n-1], s.free[:n-1]
		s.names[id] = name
	} else {
		id = uint32(len(s.names))
		s.names, s.refs = append(s.names, name), append(s.refs, 0)
	}
	s.ids[name] = id
	s.bytes += len(name)
	return id
}

// name returns the salt of that number.
func (s *salts) name(id uint32) string {
	if id == 0 {
		return ""
	}
	return s.names[id]
}

// hold counts a block that has the salt.
func (s *salts) hold(id uint32) {
	if id != 0 {
		s.refs[id]++
	}
}

// release takes back a hold, and frees the salt of which none is left.
func (s *salts) release(id uint32) {
	if id == 0 {
		return
	}
	if s.refs[id]--; s.refs[id] == 0 {
		s.drop(id)
	}
}

// unused frees the salt if no block has it.
func (s *salts) unused(id uint32) {
	if id != 0 && s.refs[id] == 0 && s.names[id] != "" {
		s.drop(id)
	}
}

func (s *salts) drop(id uint32) {
	delete(s.ids, s.names[id])
	s.bytes -= len(s.names[id])
	s.names[id] = ""
	s.free = append(s.free, id)
}
