// Slots of a channel in the memory of the receiver's GPU.
//
//   sender                                      receiver
//   copy stream: waits for consumed[i]          exports memory and events, once
//                tensor ──copy──> slot i ──────────────────┐
//                records written[i]                        v
//   publishes it when done    ── entry ──>      its stream waits for written[i]; a view of slot i
//   may use slot i again <── credit ──          returns it when consumed[i], recorded on its stream
//                                               after the last use, is done
//
// The slots are in the receiver's memory so that one copy is enough. If they were in the sender's
// memory, every kernel of the receiver would read them over the bus, or they would have to be
// copied once more. The receiver owns all exported objects, so it may free them only after the
// sender has closed them.
//
// Each end reports only finished work. The waits for events therefore never block; they only order
// the devices' views of memory. No stream ever waits for another process, which may be killed at
// any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/owners.h"

namespace adaptive::cuda {

// The receiver's end.
class Arena {
 public:
  Arena() = default;
  // Throws Error if the device does not have enough memory.
  Arena(const std::shared_ptr<const Context>& context, unsigned slots, std::size_t slot_bytes);
  Arena(Arena&&) noexcept = default;
  Arena& operator=(Arena&&) noexcept = default;

  // Returns the bytes that describe the exported objects to the sender.
  std::vector<std::uint8_t> export_all() const;

  Address slot(unsigned index) const noexcept { return memory_.get() + index * stride_; }
  const Event& written(unsigned slot) const { return written_[slot]; }
  const Event& consumed(unsigned slot) const { return consumed_[slot]; }
  const Context& context() const noexcept { return memory_.context(); }
  const std::shared_ptr<const Context>& shared_context() const noexcept {
    return memory_.shared_context();
  }
  std::size_t size_bytes() const noexcept { return size_bytes_; }

  // Keeps all objects until the process exits.
  void leak() noexcept;

 private:
  std::size_t stride_ = 0;
  std::size_t size_bytes_ = 0;
  std::vector<Event> written_;
  std::vector<Event> consumed_;
  Memory memory_;
};

// The sender's end, which opens the objects that the receiver exported.
class PeerArena {
 public:
  PeerArena() = default;
  // Opens the objects that another process described with export_all(). Throws Error unless the
  // number and the size of its slots are equal to `slots` and `slot_bytes`.
  PeerArena(const std::shared_ptr<const Context>& context,
            const std::vector<std::uint8_t>& exported, unsigned slots, std::size_t slot_bytes);
  PeerArena(PeerArena&&) noexcept = default;
  PeerArena& operator=(PeerArena&&) noexcept = default;

  Address slot(unsigned index) const noexcept { return memory_.get() + index * stride_; }
  const Event& written(unsigned slot) const { return written_[slot]; }
  const Event& consumed(unsigned slot) const { return consumed_[slot]; }
  const Context& context() const noexcept { return memory_.context(); }

 private:
  std::size_t stride_ = 0;
  std::vector<Event> written_;
  std::vector<Event> consumed_;
  PeerMemory memory_;
};

}  // namespace adaptive::cuda
