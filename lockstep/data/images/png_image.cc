// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/images/png_image.h"

#include <png.h>

#include "lockstep/base/to_size.h"

namespace lockstep {
namespace {

// libpng's simplified interface: any colour type, depth and interlacing becomes 8-bit RGB.
class PngReader {
 public:
  explicit PngReader(std::span<const std::uint8_t> file) {
    image_.version = PNG_IMAGE_VERSION;
    if (png_image_begin_read_from_memory(&image_, file.data(), file.size()) == 0)
      throw damaged_image("PNG", image_.message);
    image_.format = PNG_FORMAT_RGB;
  }
  ~PngReader() { png_image_free(&image_); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  ImageShape shape() const { return {3, image_.height, image_.width}; }

  void read(std::uint8_t* into) {
    const png_color black{};
    if (png_image_finish_read(&image_, &black, into, 0, nullptr) == 0) throw damaged_image("PNG", image_.message);
  }

 private:
  png_image image_{};
};

}  // namespace

ImageShape png_shape(std::span<const std::uint8_t> file) { return PngReader(file).shape(); }

ImageView decode_png(std::span<const std::uint8_t> file, DecodeScratch& scratch) {
  PngReader reader(file);
  const ImageShape shape = reader.shape();
  scratch.resize(to_size(shape.values()));
  reader.read(scratch.data());
  return interleaved(scratch.data(), shape);
}

}  // namespace lockstep
