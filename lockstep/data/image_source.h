// data/image_source.h: where images come from: memory, a folder, packed records. It gives bytes as they are stored; what is
// made of them is data/image_dataset.h's.
//
// Threads: const; the loader's workers call it at the same time
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/image.h"
#include "lockstep/data/order.h"

namespace lockstep {

struct StoredImage {
  std::span<const std::uint8_t> bytes;  // valid as long as the source and the scratch memory are left alone
  bool encoded = false;                 // JPEG or PNG; else planar pixels of `shape`
  ImageShape shape;                     // of planar pixels
  std::int64_t label = 0;               // in [0, classes())
};

class ImageSource {
 public:
  virtual ~ImageSource() = default;
  virtual std::string name() const = 0;
  virtual std::int64_t size() const = 0;
  virtual std::int64_t channels() const = 0;  // of every sample; what is encoded becomes RGB: 3
  virtual std::int64_t classes() const = 0;
  virtual ImageShape common_shape() const = 0;  // of all images; height and width 0: they differ, or nobody knows
  virtual bool in_memory() const { return false; }

  // Throws DataError: unreadable, damaged.
  virtual StoredImage read(std::int64_t index, std::vector<std::uint8_t>& scratch) const = 0;

  // These are about to be read: a source on disk starts reading them now, all at once.
  virtual void will_read(std::span<const std::int64_t> indices) const { static_cast<void>(indices); }

  virtual std::string origin(std::int64_t index) const = 0;  // file and place of a sample, for messages
  virtual std::shared_ptr<const SampleOrder> shuffled_order() const { return nullptr; }
};

}  // namespace lockstep
