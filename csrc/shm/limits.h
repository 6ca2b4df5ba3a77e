// Determines how much memory this process may still allocate, and which limit applies.
#pragma once

#include <cstdint>
#include <string>

namespace adaptive {

struct MemoryRoom {
  std::uint64_t bytes = 0;
  std::string limit;   // "memory.max of the container, /sys/fs/cgroup/x/memory.max"
  std::string remedy;  // "give the container more memory"
};

// Paths of the kernel's files; tests use other paths.
struct SystemPaths {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// Returns the tightest of these limits: the free memory of the machine, the limits of this
// process's control groups (both versions), and the limit of its address space. A limit that cannot
// be read is ignored.
MemoryRoom memory_room(const SystemPaths& paths = {});

// Throws Error, with the limit and a remedy, unless `bytes` plus a reserve fit into the available
// memory. `purpose` is text such as "the channel to rank 3 (8 slots of 4 MiB)".
void check_memory(std::uint64_t bytes, const std::string& purpose, const SystemPaths& paths = {});

// Returns the number after `name` in a file of lines "name number", or 0 if there is no such line.
std::uint64_t read_field(const std::string& path, const std::string& name);

// Returns text such as "1.5 GiB".
std::string bytes_text(std::uint64_t bytes);

}  // namespace adaptive
