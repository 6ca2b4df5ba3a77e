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

// Returns the smallest limit: free memory of the machine, limits of this process's control groups
// (both versions), or address space. A limit that cannot be read is ignored.
MemoryRoom memory_room(const SystemPaths& paths = {});

// Throws Error with the limit and a remedy unless `bytes` and a reserve fit into the free memory.
// `purpose` is text such as "the channel to rank 3 (8 slots of 4 MiB)".
void check_memory(std::uint64_t bytes, const std::string& purpose, const SystemPaths& paths = {});

// Returns the number after `name` in a file of lines "name number"; 0 if it is missing.
std::uint64_t read_field(const std::string& path, const std::string& name);

// "1.5 GiB"
std::string bytes_text(std::uint64_t bytes);

}  // namespace adaptive
